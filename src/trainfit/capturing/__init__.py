"""Capture: run one training step on tensors without memory, and write down what happened as a `Trace`.

The files, in the order in which a step passes through them: `session` (builds the step), `steps`,
`python_state`, `growth` and `lbfgs` (how often it runs, which run is the worst, what grows), `interrupts`
(Ctrl-C), `patches` (Python functions of torch that need a stand-in), `compiler` and `compiled` (compiled code
runs eagerly, and is noticed), `disk` (no tensors are written), `processes` (workers are ordinary Python),
`explaining` (errors that are ours), `composites` and `derivatives` (paths of torch that differ under a
dispatch mode), `dispatch` (every operator call), `engine` (what backward does in place), `operators` and
`metadata` (what the call is, what it returns), `own_kernels` and `handlers` (operators that need more),
`values` and `known_masks` (what is known and what is assumed), `waiting` (where the host waits for the
device), `hollow` and `ledger` (tensors without memory, and who holds them), `autograd` and `modules` (saved
tensors, backward nodes, names), `recorder` (rows), `describing` (what step it is), `assemble` (the trace).
"""

from trainfit.capturing.session import capture

__all__ = ["capture"]
