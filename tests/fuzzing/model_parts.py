"""The parts of which generated models consist: each maps a (batch, seq, width) tensor to such a one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Part:
    """One part of a model and the parts inside it; shown as `residual(linear, gelu)`."""

    name: str
    inside: tuple[Part, ...] = ()

    def __repr__(self) -> str:
        """Show it as a call."""
        return f"{self.name}({', '.join(map(repr, self.inside))})" if self.inside else self.name

    def module(self, width: int) -> nn.Module:
        """Make the module."""
        if not self.inside:
            return LEAVES[self.name](width)
        return COMPOSITES[self.name](nn.Sequential(*(part.module(width) for part in self.inside)), width)


class Formula(nn.Module):
    """A function without weights as a module."""

    def __init__(self, formula: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(x)


class Around(nn.Module):
    """A formula of the input and of the module inside."""

    def __init__(
        self, inside: nn.Module, formula: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.inside, self.formula = inside, formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(self.inside, x)


class Weighted(nn.Module):
    """A formula of the input and of a weight of its own."""

    def __init__(self, formula: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.weight, self.formula = nn.Parameter(torch.randn(*shape) * 0.1), formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(x, self.weight)


class Transposed(nn.Module):
    """A module that wants its channels before its positions."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inside(x.transpose(1, 2))
        return result.transpose(1, 2)


class Recurrent(nn.Module):
    """A recurrent network whose last state is not used."""

    def __init__(self, kind: Any, width: int, **settings: Any) -> None:
        super().__init__()
        self.network = kind(width, width, batch_first=True, **settings)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.network(x)[0]
        return result


class Attention(nn.Module):
    """Attention over two heads, fused or written out, causal or not."""

    def __init__(self, width: int, *, causal: bool = False, fused: bool = True) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.causal, self.fused = causal, fused

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            scores = q @ k.transpose(-2, -1) / (width // 2) ** 0.5
            if self.causal:
                hidden = torch.ones(seq, seq, dtype=torch.bool, device=x.device).triu(1)
                scores = scores.masked_fill(hidden, float("-inf"))
            y = scores.softmax(-1) @ v
        result: Tensor = self.out(y.transpose(1, 2).reshape(batch, seq, width))
        return result


class TorchAttention(nn.Module):
    """torch's own attention module, with the weights that hardly anybody reads."""

    def __init__(self, width: int, needs_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.needs_weights = needs_weights

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.attention(x, x, x, need_weights=self.needs_weights)[0]
        return result


class Looked(nn.Module):
    """Adds an embedding that is chosen by the values of the input."""

    def __init__(self, width: int, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(7, width, sparse=sparse)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x.detach().float().sum(-1).abs() * 3).long() % 7
        return x + self.table(chosen).to(x.dtype)


class Remembering(nn.Module):
    """Keeps a running mean in a buffer, and counts its calls."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.float().mean((0, 1)), alpha=0.1)
            self.calls += 1
        return x - self.mean.to(x.dtype)


class Tied(nn.Module):
    """Uses one weight in two directions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(x)))
        return result


class DoubledGradient(torch.autograd.Function):
    """The identity, whose gradient is twice what comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 2 + x * 0


def _in_place_on_copy(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0] = y[:, -1] * 2
    y[..., 1:].mul_(0.5)
    return y


def _hooked(x: Tensor) -> Tensor:
    y = x * 2
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 0.5)
    return y


def _read_scalar(x: Tensor) -> Tensor:
    scale = x.detach().abs().max().item()
    return x / (1.0 + (scale if scale < 1e6 else 1e6))


def _known_choice(x: Tensor) -> Tensor:
    positions = torch.arange(x.shape[1], device=x.device)
    if (positions[-1] >= 0).all() and int(positions.max()) == x.shape[1] - 1:
        return x * (positions % 2 == 0)[None, :, None]
    return x.repeat(1, 3, 1)


def _padded(x: Tensor) -> Tensor:
    return F.pad(x, (1, 2))[..., 1:-2]


def _sorted(x: Tensor) -> Tensor:
    values, order = x.sort(-1)
    return values + x.gather(-1, order)


def _in_weights_dtype(norm: Any, x: Tensor) -> Tensor:
    """Weights in 16 bits want their input so; a GPU's autocast sums in fp32, where a CPU's does not."""
    result: Tensor = norm(x if norm.weight.dtype == torch.float32 else x.to(norm.weight.dtype))
    return result


LEAVES: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda w: nn.Linear(w, w),
    "linear_no_bias": lambda w: nn.Linear(w, w, bias=False),
    "mlp": lambda w: nn.Sequential(nn.Linear(w, 3 * w), nn.ReLU(inplace=True), nn.Linear(3 * w, w)),
    "frozen_linear": lambda w: nn.Linear(w, w).requires_grad_(False),
    "weight_norm": lambda w: parametrizations.weight_norm(nn.Linear(w, w)),
    "spectral_norm": lambda w: parametrizations.spectral_norm(nn.Linear(w, w)),
    "tied": Tied,
    "bilinear": lambda w: Weighted(lambda x, m: torch.einsum("bsi,ij,btj->bst", x, m, x) @ x, w, w),
    "scale": lambda w: Weighted(lambda x, m: x * m, w),
    "gate": lambda w: Weighted(lambda x, m: x * torch.sigmoid(x @ m), w, w),
    "bmm": lambda w: Weighted(lambda x, m: torch.bmm(x, m.expand(x.shape[0], -1, -1)), w, w),
    "layer_norm": nn.LayerNorm,
    "rms_norm": nn.RMSNorm,
    "batch_norm": lambda w: Transposed(Around(nn.BatchNorm1d(w), _in_weights_dtype)),
    "group_norm": lambda w: Transposed(nn.GroupNorm(2, w)),
    "instance_norm": lambda w: Transposed(Around(nn.InstanceNorm1d(w, affine=True), _in_weights_dtype)),
    "normalise": lambda w: Formula(lambda x: F.normalize(x, dim=-1)),
    "conv": lambda w: Transposed(nn.Conv1d(w, w, 3, padding=1)),
    "depthwise_conv": lambda w: Transposed(nn.Conv1d(w, w, 3, padding=1, groups=w)),
    "conv_2d": lambda w: Around(nn.Conv2d(1, 1, 3, padding=1), lambda conv, x: conv(x[:, None])[:, 0]),
    "attention": Attention,
    "causal_attention": lambda w: Attention(w, causal=True),
    "written_attention": lambda w: Attention(w, causal=True, fused=False),
    "torch_attention": lambda w: TorchAttention(w, False),
    "torch_attention_weights": lambda w: TorchAttention(w, True),
    "lstm": lambda w: Recurrent(nn.LSTM, w),
    "gru": lambda w: Recurrent(nn.GRU, w, num_layers=2),
    "relu": lambda w: nn.ReLU(),
    "relu_in_place": lambda w: Formula(lambda x: F.relu_(x * 1.5)),
    "gelu": lambda w: nn.GELU(),
    "silu": lambda w: nn.SiLU(),
    "tanh": lambda w: nn.Tanh(),
    "softmax": lambda w: nn.Softmax(-1),
    "log_softmax": lambda w: nn.LogSoftmax(-1),
    "prelu": lambda w: nn.PReLU(),
    "elu": lambda w: nn.ELU(),
    "softplus": lambda w: nn.Softplus(),
    "hardswish": lambda w: nn.Hardswish(),
    "glu": lambda w: Formula(lambda x: F.glu(torch.cat((x, x), -1))),
    "dropout": lambda w: nn.Dropout(0.3),
    "dropout_all": lambda w: Formula(lambda x: F.dropout(x, 0.0) + F.dropout1d(x, 0.5)),
    "noise": lambda w: Formula(lambda x: x + 0.1 * torch.randn_like(x)),
    "embedding": lambda w: Looked(w, False),
    "sparse_embedding": lambda w: Looked(w, True),
    "running_mean": Remembering,
    "own_function": lambda w: Formula(lambda x: DoubledGradient.apply(x)),
    "write_into_copy": lambda w: Formula(_in_place_on_copy),
    "hook": lambda w: Formula(_hooked),
    "read_scalar": lambda w: Formula(_read_scalar),
    "known_choice": lambda w: Formula(_known_choice),
    "pad": lambda w: Formula(_padded),
    "sort": lambda w: Formula(_sorted),
    "cumsum": lambda w: Formula(lambda x: x.cumsum(1) / 4),
    "split": lambda w: Formula(lambda x: torch.cat([half * 2 for half in x.chunk(2, -1)][::-1], -1)),
    "roll": lambda w: Formula(lambda x: x.roll(1, 1) + x.flip(0)),
    "expand": lambda w: Formula(lambda x: x + x.mean(1, keepdim=True).expand_as(x).contiguous()),
    "where": lambda w: Formula(lambda x: torch.where(x > 0, x, x.exp() - 1)),
    "clamp": lambda w: Formula(lambda x: x.clamp(-1, 1).abs().sqrt() * x.sign()),
    "top": lambda w: Formula(lambda x: x + x.topk(2, -1).values.sum(-1, keepdim=True)),
    "logsumexp": lambda w: Formula(lambda x: x - x.logsumexp(-1, keepdim=True)),
    "unused": lambda w: nn.Sequential(nn.Identity(), Around(nn.Linear(w, w), lambda linear, x: x)),
}


def _without_gradient(inside: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        known = inside(x)
    return x + known


def _in_dtype(dtype: torch.dtype) -> Callable[[nn.Sequential, int], nn.Module]:
    def make(inside: nn.Sequential, width: int) -> nn.Module:
        # Only the weights, so that whatever counts stays whole.
        return Around(inside.to(dtype), lambda part, x: x + part(x.to(dtype)).to(x.dtype))

    return make


def _autocast(inside: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return x + inside(x).to(x.dtype)


def _in_place_sum(inside: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (inside(x) * 0.5).add_(x)


def _again_while_training(inside: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    for _ in range(2 if x.shape[1] % 2 else 1):
        x = inside(x)
    return x


COMPOSITES: dict[str, Callable[[nn.Sequential, int], nn.Module]] = {
    "sequence": lambda inside, w: inside,
    "residual": lambda inside, w: Around(inside, lambda part, x: x + part(x)),
    "residual_in_place": lambda inside, w: Around(inside, _in_place_sum),
    "branches": lambda inside, w: Around(inside, lambda parts, x: sum((part(x) for part in parts), x * 0)),
    "stacked": lambda inside, w: Around(inside, lambda ps, x: torch.stack([p(x) for p in ps]).mean(0)),
    "twice": lambda inside, w: Around(inside, lambda part, x: part(part(x)) * part(x).sigmoid()),
    "loop": lambda inside, w: Around(inside, _again_while_training),
    "checkpoint": lambda inside, w: Around(inside, lambda p, x: checkpoint(p, x, use_reentrant=False)),
    "reentrant": lambda inside, w: Around(inside, lambda p, x: checkpoint(p, x, use_reentrant=True)),
    "no_grad": lambda inside, w: Around(inside, _without_gradient),
    "detached": lambda inside, w: Around(inside, lambda part, x: x + part(x.detach())),
    "bfloat16": _in_dtype(torch.bfloat16),
    "float64": _in_dtype(torch.float64),
    "autocast": lambda inside, w: Around(inside, _autocast),
}
