"""Which device to rent: the same step on several, what a whole run takes and costs, the cheapest that fits.

price_text        prices per hour as the user gives them, by device
run_length        how long a run is, in tokens or epochs, and what it takes and costs
shared_captures   one capture for devices on which the step does the same
compared_rows     one row per device, the cheapest and the fastest
found_comparison  the answer, with its text, its JSON and its tables
which_device      `compare`
"""
