"""Where modules, backward and optimizers begin and end: the recorder is told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trainfit.capturing.autograd import NodeHooks
from trainfit.capturing.recorder import OPTIMIZER, Recorder
from trainfit.capturing.replacing import replaced

_FORWARD = "forward"
_every_module = nn.modules.module
OnStepped = Callable[[torch.optim.Optimizer], None]
"""Hears of an optimizer whose step is over."""


@contextlib.contextmanager
def followed(recorder: Recorder, on_stepped: OnStepped) -> Iterator[None]:
    """Tell the recorder of every module call, run of autograd's engine and step of an optimizer."""
    nodes = NodeHooks(recorder)
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(nn.Module, "__call__", lambda o: _module_call(recorder, o)))
        for owner in (torch.autograd, torch.autograd.graph):
            stack.enter_context(replaced(owner, "_engine_run_backward", lambda o: _run_backward(nodes, o)))
        stack.enter_context(_optimizer_hooks(recorder, on_stepped))
        yield


def _module_call(recorder: Recorder, original: Any) -> Any:
    # Not forward hooks: this also sees calls that raise, and costs less.
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        number = recorder.enter_module(self)
        body = _body_seen(recorder, self, number) if _has_hooks(self) else contextlib.nullcontext()
        try:
            with body:
                return original(self, *args, **kwargs)
        finally:
            recorder.leave_module(number)

    return __call__


def _has_hooks(module: nn.Module) -> bool:
    own = module._forward_hooks or module._forward_pre_hooks
    everywhere = _every_module._global_forward_hooks or _every_module._global_forward_pre_hooks
    return bool(own or everywhere or module._backward_hooks or module._backward_pre_hooks)


@contextlib.contextmanager
def _body_seen(recorder: Recorder, module: nn.Module, number: int) -> Iterator[None]:
    """Tell the recorder where a module's `forward` begins and ends between its hooks.

    An attribute hides `forward` until it is called: only hooks before it could see that.
    """
    attributes, forward = vars(module), module.forward
    own = attributes.get(_FORWARD)

    def put_back() -> None:
        if attributes.get(_FORWARD) is not noticed:
            return
        if own is None:
            del attributes[_FORWARD]
        else:
            attributes[_FORWARD] = own

    def noticed(*args: Any, **kwargs: Any) -> Any:
        put_back()
        recorder.enter_body(number)
        try:
            return forward(*args, **kwargs)
        finally:
            recorder.leave_body(number)

    attributes[_FORWARD] = noticed
    try:
        yield
    finally:
        put_back()


def _run_backward(nodes: NodeHooks, original: Any) -> Any:
    # The one door into autograd's engine for `backward`, `grad` and reentrant checkpointing.
    def run(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        creating_graph = bool(args[2]) if len(args) > 2 else False
        with nodes.backward(t_outputs, creating_graph=creating_graph):
            return original(t_outputs, *args, **kwargs)

    return run


@contextlib.contextmanager
def _optimizer_hooks(recorder: Recorder, on_stepped: OnStepped) -> Iterator[None]:
    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder.note_gradients(optimizer)
        recorder.enter_context(OPTIMIZER)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder.leave_context()
        on_stepped(optimizer)

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
