"""What only a cluster decides: units of FSDP, which stay whole after forward, what is gathered ahead.

unit_trials     one setting: captured, planned within the budget, certified
unit_search     the fastest of many settings, with few captures
found_sharding  what is found, with its text, its JSON and its tables
"""
