"""Carries out parameters that are on the host: each comes to the device while its module needs it.

Between uses a parameter *is* its values on the host: whatever code looks at it finds them there. The module's
`forward` brings it in, and lets it go. What autograd saves of it is only which part it was, and backward
brings it in again. The optimizer's step does so for a few parameters at a time. Gradients stay on the device.

Copies run on the queue of the kernels, so nothing overlaps with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from trainfit.changes.change import NotPossible
from trainfit.changes.hidden_forward import HiddenForward
from trainfit.changes.host_memory import arrived, to_device, to_host
from trainfit.changes.step_in_parts import add_mover, drop_mover, refuse_coupled, size_of

SMALL_SHARE = 1e-3
"""Of all parameters: what is smaller stays on the device, because a copy has a least time."""
_top_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks


def keep_parameters_on_host(model: nn.Module, optimizers: Iterable[Optimizer]) -> OffloadedParameters:
    """Keep a model's large parameters on the host, until `remove`; `NotPossible` says why they cannot be."""
    optimizers = tuple(optimizers)
    refuse_coupled(optimizers)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise NotPossible("parameters that several processes share have to stay on the device")
    units = dict(_units(model))
    names = {parameter: name for name, parameter in model.named_parameters()}
    updated = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for module, parameters in units.items():
        if isinstance(module, nn.RNNBase) or getattr(module, "_compiled_call_impl", None) is not None:
            raise NotPossible(f"a {type(module).__name__} uses its parameters where that cannot be noticed")
        for parameter in parameters:
            _refuse(parameter, names.get(parameter, "a parameter"), parameter in updated)
    if not units:
        raise NotPossible("the model has no parameters")
    return OffloadedParameters(units, optimizers)


def _units(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Yield the modules that have large parameters of their own, and those."""
    whole = sum(map(size_of, model.parameters()))
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module in inside:
            continue
        together = isinstance(module, nn.MultiheadAttention)
        if together:
            inside.update(module.modules())  # it uses the weights of the modules in it without calling them
        own = module.parameters(recurse=together)
        large = [parameter for parameter in own if size_of(parameter) >= SMALL_SHARE * whole]
        if large:
            yield module, large


def _refuse(parameter: nn.Parameter, name: str, updated: bool) -> None:
    """Raise `NotPossible` for a parameter that cannot change its place."""
    if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided:
        raise NotPossible(f"{name} is a {type(parameter).__name__}, not a plain parameter")
    if parameter.is_meta or parameter.untyped_storage().nbytes() != size_of(parameter):
        raise NotPossible(f"{name} shares its memory with other tensors, or has none")
    if parameter.requires_grad and not updated:
        raise NotPossible(f"the optimizer does not have {name}, which gets gradients")


@dataclass(eq=False)
class _Traveller:
    """One parameter, and where it is."""

    parameter: nn.Parameter
    device: torch.device
    home: Tensor
    """Its values on the host."""
    users: int = 0
    """How many calls need it on the device now."""
    version: int = 0
    """How often it had been written to when it came."""

    @torch.no_grad()
    def come(self) -> None:
        if self.users == 0:
            self._note_replacement()
            self.parameter.data = to_device(self.home, self.device)
            self.version = self.parameter._version
        self.users += 1

    @torch.no_grad()
    def go(self, updated: bool = False) -> None:
        self.users -= 1
        if self.users == 0:
            # Kernels of optimizers do not all count as writes.
            if updated or self.parameter._version != self.version:
                to_host(self.parameter.data, self.home)
            self.parameter.data = self.home

    def _note_replacement(self) -> None:
        """Take over what other code has put into the parameter's place, as `model.to` does."""
        if _storage(self.parameter) != _storage(self.home):
            found = self.parameter.data
            self.device = found.device if found.is_cuda else self.device
            self.home = to_host(found)
            arrived(self.device)


@dataclass(frozen=True, eq=False)
class _SavedPart:
    """What autograd keeps of a parameter: which part of it it was."""

    traveller: _Traveller
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @torch.no_grad()
    def again(self) -> Tensor:
        traveller = self.traveller
        _refuse_written(traveller.parameter, self.version)
        # Views of the parameter itself would be seen as views of a leaf.
        present = traveller.parameter.data if traveller.users else to_device(traveller.home, traveller.device)
        return present.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True, eq=False)
class _HeldTensor:
    """Any other tensor that autograd keeps. To notice that it was written to is left to hooks."""

    tensor: Tensor
    version: int

    def again(self) -> Tensor:
        _refuse_written(self.tensor, self.version)
        return self.tensor


def _refuse_written(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {list(tensor.shape)} is at version {tensor._version}, expected {version}."
        )


class OffloadedParameters:
    """Keeps parameters of one model on the host."""

    def __init__(self, units: dict[nn.Module, list[nn.Parameter]], optimizers: Sequence[Optimizer]) -> None:
        """Move them, and let the modules and optimizers bring them in."""
        self._travellers: dict[Tensor, _Traveller] = {}
        with torch.no_grad():
            for parameter in dict.fromkeys(p for parameters in units.values() for p in parameters):
                device, home = parameter.device, to_host(parameter.data)
                arrived(device)
                self._travellers[parameter] = _Traveller(parameter, device, home)
                parameter.data = home
        self._forwards = [
            _BringingForward(module, [self._travellers[parameter] for parameter in parameters])
            for module, parameters in units.items()
        ]
        self._optimizers = tuple(optimizers)
        for optimizer in self._optimizers:
            add_mover(optimizer, self)

    def remove(self) -> None:
        """Put the parameters back to where they were."""
        for forward in self._forwards:
            forward.leave()
        for optimizer in self._optimizers:
            drop_mover(optimizer, self)
        for traveller in self._travellers.values():
            traveller.come()
        self._travellers.clear()

    def fetch(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Bring parameters in, to be updated."""
        for traveller in filter(None, map(self._travellers.get, parameters)):
            traveller.come()

    def send(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Let updated parameters go; what was written to them is copied first."""
        for traveller in filter(None, map(self._travellers.get, parameters)):
            traveller.go(updated=True)


class _BringingForward(HiddenForward):
    """Takes the place of a module's `forward`: its parameters are on the device meanwhile."""

    def __init__(self, module: nn.Module, travellers: list[_Traveller]) -> None:
        super().__init__(module)
        self._travellers = travellers
        self.hide(module)

    def leave(self) -> None:
        """Give the module its `forward` back, if there is still a module."""
        module = self._module()
        if module is not None:
            self.restore(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if self.removed:
            return self.__wrapped__(*args, **kwargs)
        for traveller in self._travellers:
            traveller.come()
        try:
            with _saving_without(self._travellers):
                return self.__wrapped__(*args, **kwargs)
        finally:
            for traveller in self._travellers:
                traveller.go()


def _saving_without(travellers: list[_Traveller]) -> saved_tensors_hooks:
    """Return the hooks under which autograd does not hold parameters; everything else is saved as before."""
    present = {_storage(traveller.parameter): traveller for traveller in travellers}
    outer = _top_hooks(False)

    def pack(tensor: Tensor) -> Any:
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        traveller = present.get(_storage(tensor)) if plain and not tensor.is_meta else None
        if traveller is not None:
            layout = tensor.size(), tensor.stride(), int(tensor.storage_offset())
            return _SavedPart(traveller, traveller.parameter._version, *layout)
        return _HeldTensor(tensor, tensor._version) if outer is None else outer[0](tensor)

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, _SavedPart):
            return packed.again()
        if isinstance(packed, _HeldTensor):
            return packed.again()
        restored: Tensor = outer[1](packed)
        return restored

    return saved_tensors_hooks(pack, unpack)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
