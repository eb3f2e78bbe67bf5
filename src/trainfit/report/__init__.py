"""Results for people (`text_...`, of `tables`), for programs (`json_result`), and a spinner (`progress`)."""
