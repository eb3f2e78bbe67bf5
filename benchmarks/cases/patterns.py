"""Ways to train: how the step is run, on small models of our own.

What the models are made of (layers, operators, outputs) varies in `pattern_models`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from trainfit import Step

from . import Case

CASES: list[Case] = []


def pattern(
    cases: list[Case], kind: str, convolutions: bool = False, data_dependent: bool = False
) -> Callable[[Callable[[], Step]], Callable[[], Step]]:
    """Add the decorated function to `cases`, under its own name written with dashes."""

    def register(build: Callable[[], Step]) -> Callable[[], Step]:
        def seeded() -> Step:
            torch.manual_seed(0)
            return build()

        name = build.__name__.replace("_", "-")
        cases.append(Case(name, "pattern", seeded, convolutions, data_dependent, kind))
        return build

    return register


# ----------------------------------------------------------------------------------------- the models


class MLP(nn.Sequential):
    """Linear layers with GELU between them."""

    def __init__(self, width: int = 512, depth: int = 4, inputs: int = 512, outputs: int = 512) -> None:
        widths = [inputs, *[width] * (depth - 1), outputs]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.GELU()]
        super().__init__(*layers[:-1])


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feedforward_norm = nn.LayerNorm(width)
        self.feedforward = MLP(4 * width, 2, width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, sequence, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.feedforward(self.feedforward_norm(x))


class GPT(nn.Module):
    """A small causal language model that returns its logits."""

    def __init__(self, vocabulary: int = 1000, width: int = 128, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.run_block(block, x)
        return self.head(self.norm(x))

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        """Run one block; subclasses checkpoint here."""
        return block(x)


def language_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of the next token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def random_tokens(batch: int = 8, sequence: int = 128, vocabulary: int = 1000) -> Tensor:
    return torch.randint(0, vocabulary, (batch, sequence))


def language_step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, batch: int = 8) -> Step:
    """The plain step of a language model, AdamW unless told otherwise."""
    tokens = random_tokens(batch)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Step.of(model, tokens, loss=lambda logits: language_loss(logits, tokens), optimizer=optimizer)


def regression_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int = 1024) -> Step:
    """The plain step of an `MLP` of the default shape."""
    inputs, targets = torch.randn(batch, 512), torch.randn(batch, 512)
    return Step.of(model, inputs, loss=lambda output: F.mse_loss(output, targets), optimizer=optimizer)


# -------------------------------------------------------------------------------------- training loops


@pattern(CASES, "training loop")
def gradient_accumulation() -> Step:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [random_tokens() for _ in range(4)]

    def run() -> Tensor:
        total = torch.zeros(())
        for tokens in batches:
            loss = language_loss(model(tokens), tokens) / len(batches)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Step(model, optimizer, run)


@pattern(CASES, "training loop")
def gradient_clipping() -> Step:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = random_tokens()

    def run() -> Tensor:
        loss = language_loss(model(tokens), tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(model, optimizer, run)


@pattern(CASES, "training loop")
def gradient_clipping_by_value() -> Step:
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    inputs = torch.randn(1024, 512)

    def run() -> Tensor:
        loss = model(inputs).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(model, optimizer, run)


@pattern(CASES, "training loop")
def two_optimizers_gan() -> Step:
    model = nn.ModuleDict(
        {
            "generator": MLP(512, 3, inputs=64, outputs=768),
            "discriminator": MLP(512, 3, inputs=768, outputs=1),
        }
    )
    generator, discriminator = model["generator"], model["discriminator"]
    for_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    for_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    real = torch.randn(512, 768)

    def run() -> Tensor:
        noise = torch.randn(512, 64)
        fake = generator(noise)
        truth = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake.detach())).mean()
        truth.backward()
        for_discriminator.step()
        for_discriminator.zero_grad()

        deception = F.softplus(-discriminator(fake)).mean()
        deception.backward()
        for_generator.step()
        for_generator.zero_grad()
        for_discriminator.zero_grad()
        return deception

    return Step(model, [for_generator, for_discriminator], run)


@pattern(CASES, "training loop")
def optimizer_in_backward() -> Step:
    model = MLP(depth=6)
    optimizers = {
        parameter: torch.optim.AdamW([parameter], lr=1e-3, foreach=False) for parameter in model.parameters()
    }

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    inputs, targets = torch.randn(512, 512), torch.randn(512, 512)

    def run() -> Tensor:
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    return Step(model, list(optimizers.values()), run)


@pattern(CASES, "training loop")
def ema_copy() -> Step:
    model = GPT()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = random_tokens()

    def run() -> Tensor:
        loss = language_loss(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters()):
                mean.lerp_(parameter, 0.01)
        return loss

    return Step(model, optimizer, run)


@pattern(CASES, "training loop")
def averaged_model() -> Step:
    model = MLP()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    inputs, targets = torch.randn(1024, 512), torch.randn(1024, 512)

    def run() -> Tensor:
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        average.update_parameters(model)
        return loss

    return Step(model, optimizer, run)


@pattern(CASES, "training loop")
def distillation() -> Step:
    teacher = GPT(width=192, depth=3).eval().requires_grad_(False)
    student = GPT(width=96, depth=2)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    tokens = random_tokens()

    def run() -> Tensor:
        with torch.no_grad():
            wanted = (teacher(tokens) / 2).softmax(-1)
        logits = student(tokens)
        loss = F.kl_div((logits / 2).log_softmax(-1), wanted, reduction="batchmean")
        loss = loss + language_loss(logits, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(student, optimizer, run)


@pattern(CASES, "training loop")
def momentum_contrast() -> Step:
    online = MLP(outputs=128)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.SGD(online.parameters(), lr=1e-2, momentum=0.9)
    queue = F.normalize(torch.randn(4096, 128), dim=-1)
    images = torch.randn(512, 512)

    def run() -> Tensor:
        queries = F.normalize(online(images + 0.1 * torch.randn_like(images)), dim=-1)
        with torch.no_grad():
            keys = F.normalize(target(images + 0.1 * torch.randn_like(images)), dim=-1)
        logits = torch.cat([(queries * keys).sum(-1, keepdim=True), queries @ queue.T], dim=1) / 0.1
        loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online.parameters()):
                slow.mul_(0.99).add_(fast, alpha=0.01)
            queue.copy_(torch.cat([queue[len(keys) :], keys]))
        return loss

    return Step(online, optimizer, run)


@pattern(CASES, "training loop")
def zero_grad_in_place() -> Step:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = random_tokens()

    def run() -> Tensor:
        loss = language_loss(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    return Step(model, optimizer, run)


@pattern(CASES, "training loop")
def zero_grad_first() -> Step:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = random_tokens()

    def run() -> Tensor:
        optimizer.zero_grad()
        loss = language_loss(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        return loss

    return Step(model, optimizer, run)


@pattern(CASES, "training loop")
def optimizer_closure() -> Step:
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(1024, 512), torch.randn(1024, 512)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    return Step(model, optimizer, lambda: optimizer.step(closure))


@pattern(CASES, "training loop")
def retain_graph_two_losses() -> Step:
    model = nn.ModuleDict({"trunk": MLP(), "mean": nn.Linear(512, 512), "scale": nn.Linear(512, 512)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(1024, 512), torch.randn(1024, 512)

    def run() -> Tensor:
        features = model["trunk"](inputs)
        first = F.mse_loss(model["mean"](features), targets)
        first.backward(retain_graph=True)
        second = F.softplus(model["scale"](features)).mean()
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
        return first.detach() + second.detach()

    return Step(model, optimizer, run)


@pattern(CASES, "training loop")
def variable_lengths() -> Step:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    texts = [random_tokens(1, length) for length in (37, 210, 64, 511, 128)]

    def run() -> Tensor:
        losses = [language_loss(model(text), text) for text in texts]
        loss = torch.stack(losses).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(model, optimizer, run)


@pattern(CASES, "training loop")
def chunked_cross_entropy() -> Step:
    model = GPT(vocabulary=4000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = random_tokens(vocabulary=4000)

    def chunk_loss(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model.head(hidden), targets, reduction="sum")

    def run() -> Tensor:
        hidden = model.embedding(tokens)
        for block in model.blocks:
            hidden = block(hidden)
        hidden = model.norm(hidden)[:, :-1].flatten(0, 1)
        targets = tokens[:, 1:].flatten()
        loss = torch.zeros(())
        for part, wanted in zip(hidden.split(128), targets.split(128)):
            loss = loss + checkpoint(chunk_loss, part, wanted, use_reentrant=False)
        loss = loss / len(targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(model, optimizer, run)


@pattern(CASES, "training loop")
def lora_frozen_weights() -> Step:
    class LoRA(nn.Module):
        def __init__(self, base: nn.Linear, rank: int = 8) -> None:
            super().__init__()
            self.base = base
            self.down = nn.Linear(base.in_features, rank, bias=False)
            self.up = nn.Linear(rank, base.out_features, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + 2.0 * self.up(self.down(x))

    model = GPT(width=192).requires_grad_(False)
    for block in model.blocks:
        block.qkv = LoRA(block.qkv)
        block.projection = LoRA(block.projection)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return language_step(model, torch.optim.AdamW(trainable, lr=1e-3))


@pattern(CASES, "training loop")
def frozen_trunk() -> Step:
    model = nn.ModuleDict({"trunk": MLP(1024, 6, outputs=1024), "head": nn.Linear(1024, 512)})
    model["trunk"].requires_grad_(False)
    optimizer = torch.optim.AdamW(model["head"].parameters(), lr=1e-3)
    inputs, targets = torch.randn(512, 512), torch.randn(512, 512)

    def run() -> Tensor:
        loss = F.mse_loss(model["head"](model["trunk"](inputs)), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(model, optimizer, run)


@pattern(CASES, "training loop")
def validation_after_step() -> Step:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens, held_out = random_tokens(4), random_tokens(16)

    def run() -> Tensor:
        loss = language_loss(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.inference_mode():
            validation = language_loss(model(held_out), held_out)
        model.train()
        return validation

    return Step(model, optimizer, run)


@pattern(CASES, "training loop")
def output_kept_after_step() -> Step:
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(1024, 512), torch.randn(1024, 512)
    history: list[Tensor] = []

    def run() -> Tensor:
        output = model(inputs)
        loss = F.mse_loss(output, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history[:] = [output]  # the last output stays alive into the next step
        return loss

    return Step(model, optimizer, run)


# ------------------------------------------------------------------------------------------- optimizers
# A small batch, so that the peak is the optimizer's.


@pattern(CASES, "optimizer")
def adamw_foreach() -> Step:
    model = MLP(depth=6)
    return regression_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True), batch=64)


@pattern(CASES, "optimizer")
def adamw_fused() -> Step:
    model = MLP(depth=6)
    return regression_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), batch=64)


@pattern(CASES, "optimizer")
def adamw_for_loop() -> Step:
    model = MLP(depth=6)
    return regression_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False), batch=64)


@pattern(CASES, "optimizer")
def adam_amsgrad() -> Step:
    model = MLP(depth=6)
    return regression_step(model, torch.optim.Adam(model.parameters(), lr=1e-3, amsgrad=True), batch=64)


@pattern(CASES, "optimizer")
def sgd() -> Step:
    model = MLP(depth=6)
    return regression_step(model, torch.optim.SGD(model.parameters(), lr=1e-2), batch=64)


@pattern(CASES, "optimizer")
def sgd_momentum() -> Step:
    model = MLP(depth=6)
    return regression_step(
        model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True), batch=64
    )


@pattern(CASES, "optimizer")
def adagrad() -> Step:
    model = MLP(depth=6)
    return regression_step(model, torch.optim.Adagrad(model.parameters(), lr=1e-2), batch=64)


@pattern(CASES, "optimizer")
def adafactor() -> Step:
    model = MLP(depth=6)
    return regression_step(model, torch.optim.Adafactor(model.parameters(), lr=1e-2), batch=64)


@pattern(CASES, "optimizer")
def rmsprop_centered() -> Step:
    model = MLP(depth=6)
    return regression_step(model, torch.optim.RMSprop(model.parameters(), lr=1e-3, centered=True), batch=64)


@pattern(CASES, "optimizer")
def muon_with_adamw() -> Step:
    model = GPT()
    matrices = [parameter for parameter in model.blocks.parameters() if parameter.ndim == 2]
    known = set(matrices)
    others = [parameter for parameter in model.parameters() if parameter not in known]
    optimizers = [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-3)]
    tokens = random_tokens()

    def run() -> Tensor:
        loss = language_loss(model(tokens), tokens)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return Step(model, optimizers, run)


@pattern(CASES, "optimizer")
def parameter_groups() -> Step:
    model = GPT()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 1e-4},
    ]
    return language_step(model, torch.optim.AdamW(groups, lr=1e-3))


class WordVectors(nn.Module):
    """An embedding with sparse gradients, averaged and scored."""

    def __init__(self, vocabulary: int = 20000, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, sparse=True)
        self.head = nn.Linear(width, 100)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).mean(1))


@pattern(CASES, "optimizer", data_dependent=True)
def sparse_embedding_sparse_adam() -> Step:
    model = WordVectors()
    for_embedding = torch.optim.SparseAdam(model.embedding.parameters(), lr=1e-3)
    for_head = torch.optim.Adam(model.head.parameters(), lr=1e-3)
    tokens, labels = random_tokens(64, 64, 20000), torch.randint(0, 100, (64,))

    def run() -> Tensor:
        loss = F.cross_entropy(model(tokens), labels)
        loss.backward()
        for_embedding.step()
        for_head.step()
        model.zero_grad()
        return loss

    return Step(model, [for_embedding, for_head], run)


@pattern(CASES, "optimizer")
def sparse_embedding_sgd() -> Step:
    model = WordVectors()
    labels = torch.randint(0, 100, (64,))
    return Step.of(
        model,
        random_tokens(64, 64, 20000),
        loss=lambda logits: F.cross_entropy(logits, labels),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-2),
    )


# -------------------------------------------------------------------------------------------- precision


@pattern(CASES, "precision")
def autocast_bfloat16() -> Step:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = random_tokens(4)

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = language_loss(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(model, optimizer, run)


@pattern(CASES, "precision")
def autocast_without_weight_cache() -> Step:
    model = nn.ModuleDict({"embedding": nn.Embedding(1000, 128), "block": Block(128)})
    head = nn.Linear(128, 1000)
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    tokens = random_tokens(4)
    model["head"] = head

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            x = model["embedding"](tokens)
            for _ in range(3):
                x = model["block"](x)
            loss = language_loss(model["head"](x), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(model, optimizer, run)


@pattern(CASES, "precision")
def grad_scaler_float16() -> Step:
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    inputs, targets = torch.randn(512, 512), torch.randn(512, 512)

    def run() -> Tensor:
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(model(inputs).float(), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return Step(model, optimizer, run)


@pattern(CASES, "precision")
def grad_scaler_bfloat16() -> Step:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    tokens = random_tokens(4)

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = language_loss(model(tokens), tokens)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return Step(model, optimizer, run)


@pattern(CASES, "precision")
def bfloat16_parameters() -> Step:
    return language_step(GPT().to(torch.bfloat16), batch=4)


@pattern(CASES, "precision")
def float64_parameters() -> Step:
    model = MLP(256, 4, 256, 256).double()
    inputs = torch.randn(1024, 256, dtype=torch.float64)
    return Step.of(
        model,
        inputs,
        loss=lambda output: output.pow(2).mean(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    )


@pattern(CASES, "precision")
def float32_master_weights() -> Step:
    model = MLP().to(torch.bfloat16)
    masters = [parameter.detach().float() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    inputs = torch.randn(256, 512, dtype=torch.bfloat16)

    def run() -> Tensor:
        loss = model(inputs).float().pow(2).mean()
        loss.backward()
        for master, parameter in zip(masters, model.parameters()):
            master.grad = parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters()):
                parameter.copy_(master)
        return loss

    return Step(model, optimizer, run)


# ---------------------------------------------------------------------------------------- checkpointing


class ReentrantGPT(GPT):
    """Every block is recomputed in backward, the old way."""

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        """Run one block under the reentrant checkpoint."""
        return checkpoint(block, x, use_reentrant=True)


class CheckpointedGPT(GPT):
    """Every block is recomputed in backward."""

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        """Run one block under the non-reentrant checkpoint."""
        return checkpoint(block, x, use_reentrant=False)


def keep_matmuls(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Save the results of matrix products, recompute the rest."""
    if operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class SelectivelyCheckpointedGPT(GPT):
    """Every block keeps its matrix products and recomputes the rest."""

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        """Run one block under selective checkpointing."""
        return checkpoint(
            block,
            x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(keep_matmuls),
        )


@pattern(CASES, "checkpointing")
def checkpoint_reentrant() -> Step:
    return language_step(ReentrantGPT(depth=4))


@pattern(CASES, "checkpointing")
def checkpoint_non_reentrant() -> Step:
    return language_step(CheckpointedGPT(depth=4))


@pattern(CASES, "checkpointing")
def selective_checkpoint() -> Step:
    return language_step(SelectivelyCheckpointedGPT(depth=4))


@pattern(CASES, "checkpointing")
def checkpoint_sequential() -> Step:
    model = MLP(depth=9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(2048, 512), torch.randn(2048, 512)

    def run() -> Tensor:
        output = torch.utils.checkpoint.checkpoint_sequential(model, 3, inputs, use_reentrant=False)
        loss = F.mse_loss(output, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(model, optimizer, run)


@pattern(CASES, "checkpointing")
def checkpoint_nested() -> Step:
    model = GPT(depth=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = random_tokens()

    def half(x: Tensor, first: int) -> Tensor:
        for block in model.blocks[first : first + 2]:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    def run() -> Tensor:
        x = model.embedding(tokens)
        for first in (0, 2):
            x = checkpoint(half, x, first, use_reentrant=False)
        loss = language_loss(model.head(model.norm(x)), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(model, optimizer, run)


@pattern(CASES, "checkpointing")
def saved_activations_in_bfloat16() -> Step:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = random_tokens()

    def pack(saved: Tensor) -> tuple[Tensor, torch.dtype]:
        if saved.dtype != torch.float32 or saved.numel() < 1000 or isinstance(saved, nn.Parameter):
            return saved, saved.dtype
        return saved.to(torch.bfloat16), saved.dtype

    def unpack(packed: tuple[Tensor, torch.dtype]) -> Tensor:
        return packed[0].to(packed[1])

    def run() -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = language_loss(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(model, optimizer, run)


# --------------------------------------------------------------------------------------------- autograd


@pattern(CASES, "autograd")
def gradient_penalty() -> Step:
    model = MLP(512, 4, inputs=512, outputs=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    real, fake = torch.randn(512, 512), torch.randn(512, 512)

    def run() -> Tensor:
        mix = torch.rand(512, 1)
        between = (mix * real + (1 - mix) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).pow(2).mean()
        loss = model(fake).mean() - model(real).mean() + 10 * penalty
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(model, optimizer, run)


@pattern(CASES, "autograd")
def physics_informed() -> Step:
    model = nn.Sequential(
        nn.Linear(2, 256),
        nn.Tanh(),
        nn.Linear(256, 256),
        nn.Tanh(),
        nn.Linear(256, 256),
        nn.Tanh(),
        nn.Linear(256, 1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def derivative(values: Tensor, points: Tensor) -> Tensor:
        return torch.autograd.grad(values.sum(), points, create_graph=True)[0]

    def run() -> Tensor:
        points = torch.rand(1024, 2, requires_grad=True)
        values = model(points)
        first = derivative(values, points)
        second = derivative(first[:, 0], points)[:, 0]
        loss = (first[:, 1] - 0.1 * second).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(model, optimizer, run)


@pattern(CASES, "autograd")
def adversarial_inputs() -> Step:
    model = MLP(outputs=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    inputs, labels = torch.randn(1024, 512), torch.randint(0, 10, (1024,))

    def run() -> Tensor:
        attacked = inputs.clone().requires_grad_()
        F.cross_entropy(model(attacked), labels).backward()
        optimizer.zero_grad()
        attacked = (attacked + 0.01 * attacked.grad.sign()).detach()
        loss = F.cross_entropy(model(attacked), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(model, optimizer, run)


@pattern(CASES, "autograd")
def autograd_grad_step() -> Step:
    model = GPT()
    parameters = list(model.parameters())
    tokens = random_tokens()

    def run() -> Tensor:
        loss = language_loss(model(tokens), tokens)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients):
                parameter.sub_(gradient, alpha=1e-2)
        return loss

    return Step(model, None, run)


@pattern(CASES, "autograd")
def meta_learning() -> Step:
    model = MLP(256, 3, 256, 256)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(512, 256), torch.randn(512, 256)

    def run() -> Tensor:
        weights = dict(model.named_parameters())
        for _ in range(3):  # the inner loop stays differentiable
            inner = F.mse_loss(torch.func.functional_call(model, weights, (inputs,)), targets)
            slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            weights = {name: w - 0.1 * slope for (name, w), slope in zip(weights.items(), slopes)}
        loss = F.mse_loss(torch.func.functional_call(model, weights, (inputs,)), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(model, optimizer, run)


class Swish(torch.autograd.Function):
    """x * sigmoid(x), which keeps its input and nothing else."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return gradient * gate * (1 + x * (1 - gate))


@pattern(CASES, "autograd")
def custom_autograd_function() -> Step:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = Swish.apply(layer(x))
            return x

    model = Model()
    return regression_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


@pattern(CASES, "autograd")
def straight_through_quantization() -> Step:
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(1024, 512), torch.randn(1024, 512)

    def run() -> Tensor:
        x = inputs
        for layer in model:
            if isinstance(layer, nn.Linear):
                scale = layer.weight.abs().amax(1, keepdim=True) / 127
                rounded = (layer.weight / scale).round() * scale
                x = F.linear(x, layer.weight + (rounded - layer.weight).detach(), layer.bias)
            else:
                x = layer(x)
        loss = F.mse_loss(x, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(model, optimizer, run)


@pattern(CASES, "autograd")
def module_hooks() -> Step:
    model = GPT()
    seen: dict[str, Tensor] = {}

    def remember(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seen[name] = output.detach().pow(2).mean()

        return hook

    def scale_gradient(module: nn.Module, gradients: tuple[Tensor, ...], _: object) -> tuple[Tensor, ...]:
        return tuple(gradient * 0.5 for gradient in gradients)

    for index, block in enumerate(model.blocks):
        block.register_forward_hook(remember(f"block {index}"))
        block.register_full_backward_hook(scale_gradient)
    model.head.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return language_step(model)


@pattern(CASES, "autograd")
def unused_parameters() -> Step:
    model = GPT()
    model.never_called = MLP()
    return language_step(model)


@pattern(CASES, "autograd")
def per_sample_gradients() -> Step:
    model = MLP(192, 3, 192, 10)
    parameters = dict(model.named_parameters())
    inputs, labels = torch.randn(64, 192), torch.randint(0, 10, (64,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def loss_of(weights: dict[str, Tensor], x: Tensor, label: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, weights, (x[None],))
        return F.cross_entropy(logits, label[None])

    every = torch.func.vmap(torch.func.grad_and_value(loss_of), in_dims=(None, 0, 0))

    def run() -> Tensor:
        gradients, losses = every(parameters, inputs, labels)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
        factors = (1.0 / norms).clamp(max=1.0)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.einsum("b...,b->...", gradients[name].detach(), factors) / len(factors)
        optimizer.step()
        optimizer.zero_grad()
        return losses.mean()

    return Step(model, optimizer, run)


@pattern(CASES, "autograd")
def policy_gradient() -> Step:
    policy = MLP(512, 3, 128, 16)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)

    def run() -> Tensor:
        state, gains = torch.randn(256, 128), []
        for _ in range(16):
            choice = torch.distributions.Categorical(logits=policy(state))
            action = choice.sample()
            reward = torch.randn(256) + action.float() / 16
            gains.append(-choice.log_prob(action) * reward - 0.01 * choice.entropy())
            state = torch.roll(state, 1, dims=1)
        loss = torch.stack(gains).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(policy, optimizer, run)
