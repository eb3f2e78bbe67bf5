"""Makes a model run a plan: the same object, the same results, less memory.

In the order in which a step passes through them:

- `attach.py` puts the plan's regions onto the model's modules and takes them off again;
- `planned_forward.py` is what such a module runs instead of its own `forward`;
- `planned_model.py` is what a model's regions share: which call each is, and what the user was told;
- `sharding_check.py` tells when a model is divided otherwise than its plan was made for;
- `execution.py` is what each thread runs at the moment, the only state that steers regions;
- `region.py` runs one call of a region, and again in backward;
- `saved_tensors.py` is the checkpoint around it: what autograd saves is dropped, and computed again when
  backward asks for it (where somebody else watches, `torch.utils.checkpoint` does that);
- `recording.py` is its forward, which follows the plan (`following.py`) and leaves a record (`records.py`);
- `quick_recording.py` compares it with what calls before it did (`courses.py`), and describes what differs;
- `replaying.py` computes it again in backward, with the `call_arguments.py` that it was called with, or with
  what the region before it computes again (`chaining.py`);
- `offloaded_results.py` has results in the host's memory between the two, where the plan offloads them;
- `op_results.py` returns results without computing them, `randomness.py` repeats random draws;
- `python_objects.py` sees to what Python code changes, and `sharded_modules.py` to what it must not touch;
- `modes.py` and `torch_changes.py` let a region run the operators that the capture recorded, and no others;
- `way_changes.py` makes what else a way changes, besides its plan;
- `unit_sharding.py` puts FSDP's units, and what is set about them, onto a model;
- `plain_checkpoint.py` computes regions again as a whole, where that is known to do the same.
"""

from trainfit.applying.attach import applied, apply, attach_plan, remove, runs_plan
from trainfit.applying.unit_sharding import shard

__all__ = ["applied", "apply", "attach_plan", "remove", "runs_plan", "shard"]
