"""The Python API, which the command line calls too. Its files are loaded when they are used.

`request.py` is what every question about a step begins with: its device, its trace, its prices, and how long
that took (`stopwatch.py`); `ranks_compared.py` says which rank of a cluster it is about. `predict.py` has
`capture`, `price` and `estimate`; `choose.py` has `plan` and `frontier`, `stage_notes.py` what they say of a
stage of a pipeline; `find_ways.py` has `fit`, `model_depth.py` how many layers a model has; `prove.py`
has `verify`, `prove_ways.py` that of a way, `prove_ranks.py` that of several processes, each predicted in
another one (`rank_prediction.py`); `compiled_steps.py` has `plan_compiled` and what else is asked of compiled
steps, `prove_compiled.py` their `verify`; `carry_out.py` has `apply` and `remove` of plans of both kinds;
`arrange.py` has `order`; `gauge_machine.py` has `calibrate`. `sizes.py`
has `max_batch` and `max_seq`: `size_limits.py` says which sizes there are, and `size_judge.py` what one
needs; `several.py` answers lists of batches and devices.
"""
