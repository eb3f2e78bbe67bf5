"""Planning: which activations to keep and which to compute again, so that a step fits and adds least time.

`regions.py` finds what can be checkpointed, `curves.py` the trade-off of each region, `solve.py` chooses a
point for every region, `rewrite.py` replays a plan on the trace, `certify.py` says what it really promises.
"""
