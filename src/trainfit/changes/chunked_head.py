"""A head whose logits are not computed until their loss is, and then a part of the tokens at a time.

The head (the last linear layer of a language model) returns `Logits`, which stand for hidden states and
weights. `cross_entropy` of them goes over the tokens in chunks, and computes the gradients of each chunk
while its logits are there. Whatever else is done with them computes them as usual.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainfit.changes.change import NotPossible
from trainfit.changes.chunked_cross_entropy import chunked_cross_entropy

_HEADS = ("lm_head", "head", "output", "embed_out", "unembed", "output_projection")
"""What models call their last layer."""
_SMALLEST_VOCABULARY = 1024
"""Logits of fewer classes are small."""


def chunk_loss(model: nn.Module) -> Callable[[], None]:
    """Let a model's head return logits whose loss is computed in chunks; returns what undoes it."""
    head = head_of(model)
    if head is None:
        raise NotPossible(
            "the model has no linear layer that is known to be its head (get_output_embeddings(), or one "
            f"of the names {', '.join(_HEADS)}, with at least {_SMALLEST_VOCABULARY:,} outputs)"
        )
    if "forward" in vars(head):
        raise NotPossible("the head's forward has been replaced by other code")
    # Weak, so that the module does not keep itself alive.
    reference = weakref.ref(head)

    def forward(hidden: Tensor) -> Any:
        own = reference()
        assert own is not None, "a module's attribute outlives the module"
        if not own.training or not torch.is_grad_enabled():
            return F.linear(hidden, own.weight, own.bias)
        return Logits(hidden, own.weight, own.bias)

    object.__setattr__(head, "forward", forward)
    return lambda: object.__delattr__(head, "forward")


def head_of(model: nn.Module) -> nn.Linear | None:
    """Return the layer that makes a model's logits, if it is one that is known."""
    found: Any = None
    asked: Any = getattr(model, "get_output_embeddings", None)
    if callable(asked):
        found = asked()
    for name in _HEADS:
        found = found if found is not None else getattr(model, name, None)
    plain = type(found) is nn.Linear and found.out_features >= _SMALLEST_VOCABULARY
    return found if plain else None


class Logits:
    """Logits that are not there yet: of hidden states (..., features) for each class."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None
    ) -> None:
        """`dtype` is what they are converted to; None is what the head computes in."""
        self._hidden, self._weight, self._bias, self._dtype = hidden, weight, bias, dtype

    # What usual losses do to logits before cross-entropy can be put off. ----------------------------------

    @property
    def shape(self) -> torch.Size:
        """Their shape."""
        return torch.Size((*self._hidden.shape[:-1], self._weight.shape[0]))

    @property
    def dtype(self) -> torch.dtype:
        """What they are in."""
        return self._dtype or _computed_in(self._hidden)

    @property
    def device(self) -> torch.device:
        """Where they would be."""
        return self._hidden.device

    @property
    def requires_grad(self) -> bool:
        """As the head's result has it."""
        return True

    def size(self, dim: int | None = None) -> Any:
        """Their shape, or a part of it."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """How many dimensions they have."""
        return self._hidden.dim()

    def float(self) -> Logits:
        """The same in float32."""
        return self._with(self._hidden, torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """The same in another dtype, or on the device where they are."""
        wanted = [*args, *kwargs.values()]
        dtypes = [one for one in wanted if isinstance(one, torch.dtype)]
        others = [one for one in wanted if not isinstance(one, torch.dtype)]
        if all(isinstance(one, torch.device | str) and torch.device(one) == self.device for one in others):
            return self._with(self._hidden, dtypes[0] if dtypes else self._dtype)
        return self.computed().to(*args, **kwargs)

    def contiguous(self) -> Logits:
        """They will be."""
        return self

    def view(self, *shape: Any) -> Any:
        """The same in one row of tokens."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if len(sizes) == 2 and sizes[1] in (-1, self.shape[-1]) and sizes[0] in (-1, self._tokens):
            flat = self._hidden.reshape(-1, self._hidden.shape[-1])
            if sizes != (-1, -1):
                return self._with(flat, self._dtype)
        return self.computed().reshape(sizes)

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        """The same in one row of tokens, if only they are flattened."""
        if start_dim == 0 and end_dim % self.dim() == self.dim() - 2:
            return self.view(-1, self.shape[-1])
        return self.computed().flatten(start_dim, end_dim)

    def __getitem__(self, index: Any) -> Any:
        """Some of the tokens."""
        parts = index if isinstance(index, tuple) else (index,)
        slices = all(isinstance(part, slice) or part is Ellipsis for part in parts)
        whole = Ellipsis not in parts[1:] and (len(parts) < self.dim() or parts[-1] == slice(None))
        if slices and whole and len(parts) <= self.dim():
            return self._with(self._hidden[index], self._dtype)
        return self.computed()[index]

    # -----------------------------------------------------------------------------------------------------

    @property
    def _tokens(self) -> int:
        return self._hidden.numel() // max(self._hidden.shape[-1], 1)

    def _with(self, hidden: Tensor, dtype: torch.dtype | None) -> Logits:
        return Logits(hidden, self._weight, self._bias, dtype)

    def computed(self) -> Tensor:
        """Compute them after all."""
        logits = F.linear(self._hidden, self._weight, self._bias)
        return logits if self._dtype is None else logits.to(self._dtype)

    def __getattr__(self, name: str) -> Any:
        """Do what else a tensor does with the computed ones."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.computed(), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer a function of torch that is called with such logits."""
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            loss = _loss(*args, **kwargs)
            if loss is not None:
                return loss

        def computed(value: Any) -> Any:
            return value.computed() if isinstance(value, Logits) else value

        return func(*map(computed, args), **{name: computed(value) for name, value in kwargs.items()})


def _computed_in(tensor: Tensor) -> torch.dtype:
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def _loss(
    input: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Return the loss in chunks, or None if something is asked for that chunks do not do."""
    plain = weight is None and size_average is None and reduce is None and not label_smoothing
    classes = isinstance(target, Tensor) and target.dim() == 1 and not target.is_floating_point()
    if not plain or not classes or reduction not in ("mean", "sum") or not isinstance(input, Logits):
        return None
    if input.dim() != 2 or input.shape[0] != target.shape[0]:
        return None
    return chunked_cross_entropy(
        input._hidden,
        input._weight,
        input._bias,
        target,
        computes_in=_computed_in(input._hidden),
        dtype=input.dtype,
        ignore_index=ignore_index,
        reduction=reduction,
    )
