"""What grew between two results, or two traces: by figures, categories, modules and operators.

result_reading   results of `--json`, traces and estimates, as far as they are compared
module_pairs     which module of the one is which of the other
figure_changes   the changes, as what a reader sees (`report/diff_data.py`)
allowed_growth   what may grow by how much
found_diff       `Diff`: all of it, with its text, JSON and tables
what_grew        `diff`
"""
