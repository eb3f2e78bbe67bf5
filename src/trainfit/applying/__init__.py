"""Makes a model run a plan: the same object, the same results, less memory.

In the order in which a step passes through them: `attach.py` puts the plan's regions onto the model's modules
and takes them off again; `region.py` runs one call of a region under `torch.utils.checkpoint`; `recording.py`
is its forward, which follows the plan (`following.py`) and leaves a record (`records.py`); `replaying.py`
computes it again in backward, with the `arguments.py` that it was called with; `results.py` returns results
without computing them; `randomness.py` repeats random draws; `state.py` sees to what Python code changes;
`modes.py` and `surroundings.py` let a region run the operators that the capture recorded. `whole.py` leaves
regions to torch alone, where that is known to do the same. `shared.py` is what a model's regions have in
common: which step it is, and what the user was told.
"""

from trainfit.applying.attach import applied, apply, attach_plan, remove, runs_plan

__all__ = ["applied", "apply", "attach_plan", "remove", "runs_plan"]
