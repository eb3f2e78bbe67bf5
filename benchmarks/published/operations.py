"""Single operations in plain PyTorch, forward and backward, as Liger-Kernel measures their memory.

Its scripts call a function ten times and take the peak of each call (`_test_memory` in
benchmark/scripts/utils.py): gradients are never cleared, so that each call has those of the call before. Some
scripts keep the module of Liger on the device, too. `before_mib` of a row is what was there before the
operation: for embeddings memory of rows that ran before, as rows of other providers with the same sizes show;
for rope the workspace of cuBLAS, as its script makes the angles with a product of matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from trainfit import Step

DEVICE = "cuda"
Config = dict[str, Any]


def build_operation(name: str, config: Config) -> Callable[[], Step]:
    """Return the function that builds the step of an operation."""
    return lambda: OPERATIONS[name](config)


def _dtype(config: Config) -> torch.dtype:
    found: torch.dtype = getattr(torch, config["dtype"].removeprefix("torch."))
    return found


def _step(model: nn.Module, run: Callable[[], Any], *kept: Any) -> Step:
    """`kept` stays on the device: what the script has beside the operation."""

    def once() -> None:
        run()
        assert kept is not None

    return Step(model=model, optimizer=None, run=once)


def _cross_entropy(config: Config) -> Step:
    rows = config["B"] * config["T"]
    scores = nn.Parameter(torch.randn(rows, config["V"], device=DEVICE))
    labels = torch.randint(config["V"], (rows, 1), device=DEVICE).squeeze(1)
    loss = nn.CrossEntropyLoss()
    return _step(nn.ParameterList([scores]), lambda: loss(scores, labels).backward())


class _Head(nn.Module):
    """A linear layer and a cross entropy."""

    def __init__(self, hidden: int, vocabulary: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.lin = nn.Linear(hidden, vocabulary, bias=False, dtype=dtype)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.lin(x)
        loss: Tensor = self.loss(logits, labels)
        return loss


def _linear_cross_entropy(config: Config) -> Step:
    dtype, rows = _dtype(config), config["BT"]
    model, other = (_Head(config["H"], config["V"], dtype).to(DEVICE) for _ in range(2))
    x = torch.randn(rows, config["H"], requires_grad=True, dtype=dtype, device=DEVICE)
    labels = torch.randint(config["V"], (rows, 1), device=DEVICE).squeeze(1)
    return _step(model, lambda: model(x, labels).backward(), other)


def _gated(config: Config) -> Step:
    """Llama's MLP, with its usual gate or another."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    shape = LlamaConfig(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        hidden_act=config["hidden_act"],
    )
    batch, dtype = config.get("bsz", config.get("B")), _dtype(config)
    x = torch.randn(batch, config["T"], config["hidden_size"], device=DEVICE, dtype=dtype, requires_grad=True)
    layer = LlamaMLP(shape).to(DEVICE).to(dtype)

    def run() -> None:
        y = layer(x)
        y.backward(torch.randn_like(y), retain_graph=True)

    return _step(layer, run)


class _RMSNorm(nn.Module):
    """Llama's, in float32 inside."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + 1e-6)
        return self.weight * hidden_states.to(input_dtype)


def _norm(config: Config, make: Callable[[], nn.Module], *shape: int) -> Step:
    layer, other = (make().to(DEVICE) for _ in range(2))
    x = torch.randn(shape, dtype=_dtype(config), device=DEVICE)
    gradient = torch.randn_like(x)
    x.requires_grad_(True)

    def run() -> None:
        y = layer(x)
        y.backward(gradient, retain_graph=True)

    return _step(layer, run, other)


def _rms_norm(config: Config) -> Step:
    return _norm(config, lambda: _RMSNorm(config["H"]), config["M"], config["H"])


def _layer_norm(config: Config) -> Step:
    return _norm(config, lambda: nn.LayerNorm(config["N"]), config["M"], config["N"])


def _group_norm(config: Config) -> Step:
    channels = config["C"]
    groups = channels // config["channels_per_group"]
    return _norm(config, lambda: nn.GroupNorm(groups, channels), config["M"], channels, config["H"])


def _rope(config: Config) -> Step:
    heads, key_heads, length = config["num_q_heads"], config["num_kv_heads"], config["T"]
    size, dtype = config["hidden_size"] // heads, _dtype(config)
    leaves = [
        nn.Parameter(torch.randn((1, length, n, size), device=DEVICE, dtype=dtype))
        for n in (heads, key_heads)
    ]
    query, key = (leaf.transpose(1, 2) for leaf in leaves)
    gradients = torch.randn_like(query), torch.randn_like(key)
    positions = torch.arange(length, device=DEVICE).unsqueeze(0)
    frequencies = 1.0 / (10000.0 ** (torch.arange(0, size, 2, device=DEVICE).float() / size))
    angles = positions[..., None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    del angles

    def rotated(x: Tensor) -> Tensor:
        # In the order of transformers, which decides what backward has at once.
        first = x[..., : x.shape[-1] // 2]
        second = x[..., x.shape[-1] // 2 :]
        return torch.cat((-second, first), dim=-1)

    def rotate(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        cosine, sine = cos.unsqueeze(1), sin.unsqueeze(1)
        made = (query * cosine) + (rotated(query) * sine)
        return made, (key * cosine) + (rotated(key) * sine)

    def run() -> None:
        made = rotate(query, key)
        torch.autograd.grad(made, (query, key), gradients, allow_unused=True, retain_graph=True)

    return _step(nn.ParameterList(leaves), run, frequencies, positions)


def _embedding(config: Config) -> Step:
    layer, other = (nn.Embedding(config["V"], config["D"]).to(DEVICE).to(_dtype(config)) for _ in range(2))
    tokens = torch.randint(0, config["V"], (config["B"], config["T"]), device=DEVICE)

    def run() -> None:
        y = layer(tokens)
        y.backward(torch.randn_like(y))

    return _step(layer, run, other)


class _Divergence(nn.Module):
    """Jensen and Shannon's, of logits in a low precision."""

    def forward(self, log_q: Tensor, log_p: Tensor) -> Tensor:
        dtype = log_q.dtype
        log_p, log_q = log_p.to(torch.float), log_q.to(torch.float)
        m = torch.lerp(torch.exp(log_p), torch.exp(log_q), 0.5)
        one = 0.5 * kl_div(torch.log(m), log_p, reduction="batchmean", log_target=True)
        loss = one + 0.5 * kl_div(torch.log(m), log_q, reduction="batchmean", log_target=True)
        return loss.to(dtype)


class _DistillingHead(nn.Module):
    def __init__(self, hidden: int, vocabulary: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.student_lin = nn.Linear(hidden, vocabulary, bias=False, dtype=dtype)
        self.teacher_lin = nn.Linear(hidden, vocabulary, bias=False, dtype=dtype)
        self.jsd = _Divergence()

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        student_logits = self.student_lin(student)
        teacher_logits = self.teacher_lin(teacher)
        student_prob = torch.log_softmax(student_logits / 1.0, dim=-1)
        teacher_prob = torch.log_softmax(teacher_logits / 1.0, dim=-1)
        loss: Tensor = self.jsd(student_prob, teacher_prob)
        return loss


def _linear_jsd(config: Config) -> Step:
    """The other provider's module has the same weights."""
    dtype = _dtype(config)
    model = _DistillingHead(config["H"], config["V"], dtype).to(DEVICE)
    student = torch.rand(config["BT"], config["H"], requires_grad=True, dtype=dtype, device=DEVICE)
    teacher = torch.rand(config["BT"], config["H"], dtype=dtype, device=DEVICE)
    return _step(model, lambda: model(student, teacher).backward())


OPERATIONS: dict[str, Callable[[Config], Step]] = {
    "cross_entropy": _cross_entropy,
    "fused_linear_cross_entropy": _linear_cross_entropy,
    "fused_linear_jsd": _linear_jsd,
    "geglu": _gated,
    "swiglu": _gated,
    "tiled_geglu": _gated,
    "tiled_swiglu": _gated,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "rope": _rope,
    "embedding": _embedding,
}
