"""Planning: which activations to keep and which to compute again, so that a step fits and adds least time.

In the order in which data passes: `requests.py` checks what is asked for; `model_calls.py` says which module
calls may be regions, `regions.py` what is inside of one, `groups.py` which of its ops belong together,
`unit_gathers.py` what units of FSDP in it gather when it is recomputed,
`weight_casts.py` what autocast casts again with it, and `region_flow.py` what the executor will run again;
`minimum_cut.py` and `curves.py` find the trade-off of a region, `full_recompute.py` which of its points torch
alone can carry out, `offload_curves.py` the points with copies to the host, which `host_copies.py` has the
places and times of; `effects.py` is what a point changes in memory, edit by edit (`edits.py`), and
`byte_changes.py` how many bytes; `region_inputs.py` says which inputs can be on the host;
`renumbering.py` says where ops are then, `rewrite.py` writes the trace that a choice results in, and
`replay.py` has its memory and time.
`options.py` lists what can be chosen, `known_options.py` has that of steps before, `link_shares.py` what
copies at the same time, `master.py` is the program that chooses, `planner.py` asks it, and
`certify.py` makes the choice a plan that promises what came out; `plan_replay.py` says what that plan needs
on another rank. Where an allocator hands memory out, `budget_search.py` finds the plan: `planned_columns.py`
has what the allocator is asked for under a choice, `trials.py` whether that runs, `uniform_choices.py`
choices to try, and `trial_search.py` tries and mixes them. `baselines.py` replays the usual ways.
Of a sharded step, `kept_units.py` is the trace with units that stay whole after forward, `queue_model.py` the
time of queues that wait for each other, `kept_problem.py` the program that chooses both, and
`queue_plans.py` plans by that time.
`plan_results.py` is what leaves, `infeasible.py` the message if nothing fits. `modules/` is PyTorch's
formulation, by modules; `highs.py` solves the programs of both.
"""
