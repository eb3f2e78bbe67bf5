"""DistributedDataParallel of a running program: what reduces its gradients is in C++, and cannot be put back.

It has buckets of memory of its own, notes the order in which gradients come, and rearranges the buckets after
the first step. So a capture has a reducer of its own, made as the program's was, which is gone with the rest
of the capture's state. The program's own is told of nothing: it only listens between the begin of a forward
pass, of which nobody tells it, and the end of backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch._C import _distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from trainfit.errors import CaptureError

_c10d: Any = _distributed_c10d


def renew_reducers(replicas: Iterable[DistributedDataParallel]) -> None:
    """Give models that are replicated other reducers, in a capture that puts back what they had."""
    for replica in replicas:
        _refuse(replica)
        whole: Any = replica
        parameters, sparse = whole._build_params_for_reducer()
        names = whole._build_debug_param_to_name_mapping(parameters)
        whole._ddp_init_helper(parameters, sparse, names, whole.static_graph)
        for hook, state in whole._comm_hooks:
            _c10d._register_comm_hook(whole.reducer, state, hook)


def bucket_bytes(replicas: Iterable[DistributedDataParallel], kind: str) -> int:
    """Return what the program's own reducers take of a kind of device, beside the tensors that it can reach.

    Buckets have room for every gradient; gradients that are views of them are reached.
    """
    return sum(
        parameter.nbytes
        for replica in replicas
        for parameter in replica.parameters()
        if parameter.requires_grad
        and parameter.device.type == kind
        and not (replica.gradient_as_bucket_view and parameter.grad is not None)
    )


def _refuse(replica: Any) -> None:
    said = replica._get_ddp_logging_data().get("comm_hook", "")
    for found, what in (
        (replica.static_graph, "with static_graph=True"),
        (replica.mixed_precision is not None, "with mixed_precision="),
        (_updates_in_backward(replica), "of parameters that are updated in backward"),
        (said and not replica._comm_hooks, f"with the hook {said}, which is built into torch,"),
    ):
        if found:
            raise CaptureError(
                f"DistributedDataParallel {what} counts its steps where a capture cannot put the count back. "
                "Make the plan beforehand, with trainfit plan, and apply it (trainfit.apply, or "
                "PlanCallback with the plan)."
            )


def _updates_in_backward(replica: Any) -> bool:
    return any(hasattr(parameter, "_in_backward_optimizers") for parameter in replica.parameters())
