"""The layouts of the built-in families."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from trainfit.models.bert import BertConfig
from trainfit.models.catalog import Config, Family
from trainfit.models.losses import class_loss, next_token_loss
from trainfit.models.parallel.divided_sequence import SequenceInputs, refuse_sequences
from trainfit.models.parallel.layout import Layout, not_a_multiple
from trainfit.models.parallel.pipeline import Handover, PairLoss, stage_blocks
from trainfit.models.parallel.tensor_plans import (
    Plan,
    bert_plan,
    gpt2_plan,
    llama_plan,
    mixtral_plan,
    vit_plan,
)
from trainfit.models.recipe import StepOptions
from trainfit.models.resnet import ResNetConfig
from trainfit.models.vit import ViTConfig


@dataclass(frozen=True)
class _Anatomy:
    """Where a family has its parts, by name; `*` is any one part."""

    blocks: str
    plan: Callable[[], Plan] | None = None
    first: tuple[str, ...] = ()
    """What only the first stage of a pipeline has."""
    last: tuple[str, ...] = ()
    tied: tuple[str, str] | None = None
    """Two modules that share one weight."""
    sequence_divided: bool = False
    """Whether tensor parallelism divides the sequence between the layers."""


_LLAMA = _Anatomy("blocks.*", llama_plan, ("token_embedding",), ("norm", "head"), sequence_divided=True)
_ANATOMIES: dict[Family, _Anatomy] = {
    "gpt2": _Anatomy(
        "blocks.*",
        gpt2_plan,
        ("token_embedding", "position_embedding"),
        ("norm", "head"),
        tied=("token_embedding", "head"),
    ),
    "llama": _LLAMA,
    "mixtral": _Anatomy("blocks.*", mixtral_plan, _LLAMA.first, _LLAMA.last, sequence_divided=True),
    "bert": _Anatomy(
        "layers.*", bert_plan, ("embeddings",), ("head",), tied=("embeddings.token", "head.decoder")
    ),
    "vit": _Anatomy(
        "blocks.*",
        vit_plan,
        ("patch_embedding", "class_token", "position_embedding"),
        ("norm", "head"),
    ),
    "resnet": _Anatomy("stages.*.*"),
}


class BuiltInLayout(Layout):
    """How a built-in model is divided."""

    def __init__(self, name: str, family: Family, config: Config) -> None:
        self.name, self.config = name, config
        self._anatomy = _ANATOMIES[family]
        self.loss_in_parts = not isinstance(config, ViTConfig | ResNetConfig)
        self.sequence = SequenceInputs("tokens", "positions", causal=not isinstance(config, BertConfig))
        of_classes = isinstance(config, ViTConfig | ResNetConfig | BertConfig)
        self.loss = class_loss if of_classes else next_token_loss

    @property
    def experts(self) -> int:
        """How many experts each mixture has; 0 if there are none."""
        return getattr(self.config, "experts", 0)

    def no_tensor_parallel(self, size: int, options: StepOptions) -> str | None:
        """Say why the layers cannot be divided among so many ranks; None if they can."""
        if self._anatomy.plan is None or isinstance(self.config, ResNetConfig):
            return "there is no standard way to divide convolutions; use dp, fsdp or replicate"
        widened = getattr(self.config, "feed_forward", 4 * self.config.hidden)
        kv_heads = getattr(self.config, "kv_heads", self.config.heads)
        return (
            not_a_multiple("attention heads", self.config.heads, size)
            or not_a_multiple("key and value heads", kv_heads, size)
            or not_a_multiple("columns of the feed-forward", widened, size)
            or (not_a_multiple("tokens", options.seq or 0, size) if self._divides_sequence else None)
        )

    def no_context_parallel(self, size: int, options: StepOptions) -> str | None:
        """Say why the sequence cannot be divided among so many ranks; None if it can."""
        if isinstance(self.config, ViTConfig | ResNetConfig):
            return "it reads images, and has no sequences to divide; use dp, fsdp, replicate or tp"
        causal, seq = self.sequence.causal, options.seq or 0
        return refuse_sequences("tokens", seq, size, causal=causal, device=options.device_type)

    def no_pipeline(self, size: int, options: StepOptions) -> str | None:
        """Say why the model cannot be cut into so many stages; None if it can."""
        if not self._anatomy.first:
            return "stages are cut between layers that are alike, which it does not have"
        layers: int = getattr(self.config, "layers", 0)
        if layers < size:
            return f"it has {layers} layers, fewer than there are stages"
        return None

    @property
    def _divides_sequence(self) -> bool:
        return self._anatomy.sequence_divided

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the repeated layers that the model, or its part, has."""
        if isinstance(model, PipelinePart):
            return model.own_blocks
        depth = self._anatomy.blocks.count(".")
        container = self._anatomy.blocks.partition(".")[0]
        return [
            module
            for name, module in model.named_modules()
            if name.startswith(f"{container}.") and name.count(".") == depth
        ]

    def divide_layers(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Apply the standard tensor-parallel plan, in place."""
        assert self._anatomy.plan is not None, "checked before"
        whole = model.model if isinstance(model, PipelinePart) else model
        plan = self._anatomy.plan()
        own = plan.pop("", None)
        if own is not None and next(whole.parameters(recurse=False), None) is not None:
            parallelize_module(whole, mesh, own)
        # Modules that another stage has are not there to be divided.
        there = {name for name, style in plan.items() if _has(whole, name)}
        parallelize_module(whole, mesh, {name: style for name, style in plan.items() if name in there})
        # In a pipeline the two are on different stages, each with a weight of its own.
        if self._anatomy.tied is not None and not isinstance(model, PipelinePart):
            source, sharing = (whole.get_submodule(name) for name in self._anatomy.tied)
            sharing.register_parameter("weight", source.get_parameter("weight"))

    def stage(
        self, model: nn.Module, number: int, stages: int, seq: int, places: dict[str, Tensor]
    ) -> nn.Module:
        """Return what one stage of a pipeline runs; what other stages have is let go."""
        is_first, is_last = number == 0, number == stages - 1
        for names, stays in ((self._anatomy.first, is_first), (self._anatomy.last, is_last)):
            for name in names if not stays else ():
                delattr(model, name)
        numbers = stage_blocks(len(self.blocks(model)), number, stages)
        ends, container = (is_first, is_last), self._anatomy.blocks.partition(".")[0]
        return PipelinePart(model, container, numbers, ends, seq, places.get("positions"))

    def tied_end(self, stage: nn.Module) -> nn.Module | None:
        """Return the module of a stage whose weight the other end of the pipeline has, too; None if none."""
        assert isinstance(stage, PipelinePart)
        if self._anatomy.tied is None or not (stage.is_first or stage.is_last):
            return None
        return stage.model.get_submodule(self._anatomy.tied[0 if stage.is_first else 1])

    def handover(self, tensor: DeviceMesh | None, options: StepOptions, loss: PairLoss) -> Handover:
        """Return what the stages of a pipeline hand to each other; `tensor` divides their layers."""
        assert not isinstance(self.config, ResNetConfig), "it has no stages"
        hidden, dtype = self.config.hidden, options.autocast_dtype or options.parameter_dtype
        if isinstance(self.config, ViTConfig):
            classes = self.config.classes
            return Handover((1, self.config.patches + 1, hidden), (1, classes), dtype, loss)
        seq, vocabulary = options.seq or 0, self.config.vocab_size
        if tensor is None:
            return Handover((1, seq, hidden), (1, seq, vocabulary), dtype, loss)
        own, _ = Shard.local_shard_size_and_offset(vocabulary, tensor.size(), tensor.get_local_rank())
        between = seq // tensor.size() if self._divides_sequence else seq
        return Handover(
            (1, between, hidden),
            (1, seq, own),
            dtype,
            partial(_loss_of_part, tensor, (1, seq, vocabulary), loss),
        )


def _loss_of_part(
    mesh: DeviceMesh, shape: tuple[int, ...], loss: PairLoss, logits: Tensor, labels: Tensor
) -> Tensor:
    """Return the loss, to which each rank brings its part of the vocabulary."""
    strides = (shape[1] * shape[2], shape[2], 1)
    whole = DTensor.from_local(logits, mesh, [Shard(-1)], shape=torch.Size(shape), stride=strides)
    return loss(whole, labels)


class PipelinePart(nn.Module):
    """The part of a built-in transformer that one stage of a pipeline runs. Blocks keep their numbers."""

    def __init__(
        self,
        model: nn.Module,
        container: str,
        numbers: range,
        ends: tuple[bool, bool],
        seq: int,
        positions: Tensor | None,
    ) -> None:
        """Keep the blocks of these numbers. `ends` says whether it is the first stage, and the last one."""
        super().__init__()
        self.model, self.container = model, container
        self.is_first, self.is_last = ends
        self.seq, self.positions = seq, positions
        blocks = model.get_submodule(container)
        own = nn.ModuleDict({str(n): blocks.get_submodule(str(n)) for n in numbers})
        setattr(model, container, own)

    @property
    def own_blocks(self) -> list[nn.Module]:
        """The blocks of this stage."""
        return list(self.model.get_submodule(self.container).children())

    def forward(self, received: Tensor) -> Tensor:
        """Run the stage on what the one before returned."""
        model: Any = self.model
        positions = () if self.positions is None else (self.positions,)
        hidden = model.begin(received, *positions) if self.is_first else received
        # Not the length at hand: tensor parallelism may divide the sequence between layers.
        rotation = (model.rotation(self.seq, hidden, *positions),) if hasattr(model, "rotation") else ()
        hidden = model.through(hidden, self.own_blocks, *rotation)
        result: Tensor = model.finish(hidden) if self.is_last else hidden
        # Stages hand plain tensors on; the loss puts the parts of the logits together again.
        return result.to_local() if isinstance(result, DTensor) else result


def _has(model: nn.Module, pattern: str) -> bool:
    first = pattern.partition(".")[0]
    return first in dict(model.named_children())
