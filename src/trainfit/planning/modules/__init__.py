"""Plans by modules: the formulation of PyTorch's `sac_milp`, as a planner of its own.

In the order in which data passes: `unit_names.py` finds the modules that are named, `sharding.py` has the
step of one of several processes, `sac_stats.py` the statistics of a module and their curve, `milp.py` is the
program, `candidates.py` reads its data off a trace, `policy.py` chooses the ops inside of a unit, and
`unit_planner.py` asks them for plans.
"""
