"""Results for people (`text`), for programs (`json_result`), and the spinner while they wait (`progress`)."""
