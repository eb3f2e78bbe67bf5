"""Results for people and for programs, and what is shown while one waits.

`data.py` is what a reader sees of each result, as plain data; `reading.py` makes it from results, with
`module_rows.py` for the modules worth showing; `calibrations.py` is and does both for calibrations,
`rank_report.py` for verifications of several ranks, which it also lays out; `way_checked.py` is what those
of a way have besides; `compiled_plans.py` and `compiled_checks.py` are that of compiled steps;
`diff_data.py` is that of diffs,
`ordered_data.py` that of orders, `fit_data.py` that of ways to fit, `compared_data.py` that of one step on
several devices, `scale_data.py` that of clusters of several sizes, `sharding_data.py` that of settings of
FSDP, `swept_data.py` that of grids, `sizes_data.py` that of the largest size and of several steps.
`text_estimates.py` (with `text_communication.py`), `text_plans.py`, `text_verification.py`, `text_orders.py`,
`text_calibrations.py`, `text_diffs.py`, `text_fits.py`, `text_compared.py`, `text_scale.py`,
`text_sharding.py`, `text_swept.py`, `text_sizes.py` and `text_devices.py` lay it out for people, from the
parts in `tables.py` and the picture in `sparkline.py`, as much of it as `amounts.py` says, in the words of
`figure_words.py` and `added_words.py`, which the page has too;
`text_start.py` is what `trainfit` alone prints; `json_result.py` writes it for programs, and
`saved_results.py` results of the API.
`progress.py` is the spinner.
"""
