"""FSDP2's units: which modules gather and reduce, and which memory holds what they gathered.

What a unit does to gather its parameters, or to reduce its gradients, belongs to the unit, also where another
module's hook begins it early.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup

from trainfit.capturing.replacing import replaced

if TYPE_CHECKING:
    from trainfit.capturing.dispatch import CaptureMode
    from trainfit.capturing.recorder import Recorder

_EXCHANGING = {"unshard": "gather", "wait_for_unshard": "fill", "post_backward": "reduce"}
_HOOKS = ("pre_forward", "post_forward")
"""What else these do belongs to the module that is called: views to be told of backward by, smaller parts."""
_STREAMS = {
    "all_gather_copy_in_stream": "copy-in",
    "all_gather_stream": "all-gather",
    "reduce_scatter_stream": "reduce-scatter",
    "all_reduce_stream": "all-reduce",
}


@contextlib.contextmanager
def units_followed(mode: CaptureMode) -> Iterator[None]:
    """Tell the recorder for which unit parameters are gathered and gradients reduced; name its streams."""
    with contextlib.ExitStack() as stack:
        for name, exchange in _EXCHANGING.items():
            marked = functools.partial(_of_unit, mode.recorder, exchange)
            stack.enter_context(replaced(FSDPParamGroup, name, marked))
        for name in _HOOKS:
            stack.enter_context(replaced(FSDPParamGroup, name, lambda o: _of_hooks(mode.recorder, o)))
        stack.enter_context(
            replaced(FSDPParam, "to_accumulated_grad_if_needed", lambda o: _accumulated(mode.recorder, o))
        )
        stack.enter_context(replaced(FSDPCommContext, "lazy_init", lambda o: _named_streams(mode, o)))
        yield


def _named_streams(mode: CaptureMode, original: Any) -> Any:
    def lazy_init(self: FSDPCommContext, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for attribute, name in _STREAMS.items():
            if mode.streams is not None:
                mode.streams.rename(getattr(self, attribute), name)

    return lazy_init


def _accumulated(recorder: Recorder, original: Any) -> Any:
    """What a unit keeps of the gradients that it does not reduce yet is a gradient, in whichever dtype."""

    def keep(self: FSDPParam) -> None:
        original(self)
        if self.unsharded_accumulated_grad is not None:
            recorder.ledger.is_gradient(self.unsharded_accumulated_grad)

    return keep


def _of_unit(recorder: Recorder, exchange: str, original: Any) -> Any:
    def call(self: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
        with recorder.exchanging_for(recorder.module_index(self.modules[0]), exchange):
            return original(self, *args, **kwargs)

    return call


def _of_hooks(recorder: Recorder, original: Any) -> Any:
    def call(self: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
        with recorder.exchanging_for(None, "hook"):
            return original(self, *args, **kwargs)

    return call


def sharded_units(root: nn.Module) -> Iterator[Any]:
    """Yield the units of a model."""
    return (module for module in root.modules() if isinstance(module, FSDPModule))


def gathered_parameters(root: nn.Module) -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """Yield the memory that units of a model gather parameters into, with the module of each parameter."""
    for module in sharded_units(root):
        groups: list[Any] = module._get_fsdp_state()._fsdp_param_groups
        for parameter in (one for group in groups for one in group.fsdp_params):
            whole = getattr(parameter, "_unsharded_param", None)
            partly = getattr(parameter, "_sharded_post_forward_param_data", None)
            for tensor in (*parameter.all_gather_outputs, whole, partly):
                if tensor is not None:
                    yield parameter._module_info.module, tensor
