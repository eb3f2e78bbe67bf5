"""Planning: which activations to keep and which to compute again, so that a step fits and adds least time.

In the order in which data passes: `regions.py` finds what can be checkpointed, `weight_casts.py` what
autocast casts again with it; `minimum_cut.py`, `curves.py` and `between.py` find the trade-off of each
region, `whole.py` which of its points torch alone can carry out, `effects.py` what a point changes in memory;
`master.py` is the program that chooses among them, `solve.py` asks it; `rewrite.py` writes the trace that a
choice results in, `replay.py` has its memory and time, and `certify.py` makes it a plan that promises what
came out. `baselines.py` replays the usual ways.

By modules, PyTorch's formulation: `module_names.py` finds them, `module_sharding.py` has the step of one of
several processes, `module_sac_stats.py` their statistics and curves, `module_milp.py` the program,
`module_units.py` its data, `module_policy.py` the ops inside of a unit; `module_planner.py` asks them.
`highs.py` is the solver.
"""
