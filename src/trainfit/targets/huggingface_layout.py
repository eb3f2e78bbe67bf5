"""How transformers models are divided over a mesh: by their own tensor-parallel plan, and layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from trainfit.models.parallel.layout import Layout, not_a_multiple
from trainfit.models.parallel.pipeline import Handover
from trainfit.models.parallel.tensor_styles import Copied
from trainfit.models.recipe import StepOptions

_DIVIDED = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key and value heads",
    "intermediate_size": "columns of the feed-forward",
}
_SUMMED = "replicated_with_grad_allreduce"
"""What transformers calls modules of which every rank computes a part of the gradient."""


class TransformersLayout(Layout):
    """How a transformers model is divided. Its plan gathers the logits, so that the loss is whole."""

    loss_in_parts = False

    def __init__(self, name: str, config: Any) -> None:
        self.name, self.config = f"{name} ({config.model_type})", config

    def no_tensor_parallel(self, size: int, options: StepOptions) -> str | None:
        """Say why the layers cannot be divided among so many ranks; None if they can."""
        text = self.config.get_text_config()
        if not getattr(text, "base_model_tp_plan", None):
            return "transformers has no tensor-parallel plan for it; use dp, fsdp or replicate"
        counts = ((what, getattr(text, name, None)) for name, what in _DIVIDED.items())
        reasons = (not_a_multiple(what, count, size) for what, count in counts if type(count) is int)
        return next((reason for reason in reasons if reason), None)

    def no_context_parallel(self, size: int, options: StepOptions) -> str | None:
        """Say why the sequence cannot be divided among so many ranks; None if it can."""
        return "trainfit does not divide the sequences of transformers models; write the step yourself"

    def no_pipeline(self, size: int, options: StepOptions) -> str | None:
        """Say why the model cannot be cut into so many stages; None if it can."""
        return "trainfit does not cut transformers models into stages; write the step yourself"

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the layers that transformers itself does not split; else those of the longest lists."""
        unsplit = set(getattr(model, "_no_split_modules", None) or ())
        found = [module for module in model.modules() if type(module).__name__ in unsplit]
        # One inside of another would be gathered twice.
        inside = {id(below) for module in found for below in module.modules() if below is not module}
        found = [module for module in found if id(module) not in inside]
        if found:
            return found
        lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
        return max(lists, key=len, default=[])

    def divide_layers(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Apply the model's own tensor-parallel plan, in place; what it leaves out is whole on every rank."""
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        known, apply_plan = cast(Any, model), cast(Any, apply_tensor_parallelism)
        # Whole on every rank, but computing with a part of the heads: ours do that on DTensors.
        summed = {name for name, style in known.tp_plan.items() if style == _SUMMED}
        plan = {name: style for name, style in known.tp_plan.items() if name not in summed}
        tied = _tied_head(model)
        if tied is not None:
            # A head that is divided along the vocabulary takes the embedding along.
            plan[_name_in(model, tied[0])] = "embedding_rowwise"
        apply_plan(model, mesh, plan)
        if tied is not None:
            tied[1].register_parameter("weight", tied[0].get_parameter("weight"))
        for name, module in model.named_modules():
            if any(not isinstance(own, DTensor) for own in module.parameters(recurse=False)):
                is_summed = _name_in_plan(name) in summed
                parallelize_module(module, mesh, Copied(partial_gradients=is_summed))

    def stage(self, model: nn.Module, number: int, stages: int, seq: int) -> nn.Module:
        """Return what one stage of a pipeline runs: there is none."""
        raise AssertionError("refused by `no_pipeline`")

    def handover(self, tensor: DeviceMesh | None, options: StepOptions) -> Handover:
        """Return what the stages of a pipeline hand to each other: there are none."""
        raise AssertionError("refused by `no_pipeline`")


def _tied_head(model: Any) -> tuple[nn.Module, nn.Module] | None:
    """Return the embedding and the head, if they share their weight and the plan divides the head."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is not getattr(embedding, "weight", None):
        return None
    return (embedding, head) if _name_in(model, head) in model.tp_plan else None


def _name_in_plan(name: str) -> str:
    """Return what a plan calls the module: it has a star for the number of a layer."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _name_in(model: nn.Module, module: nn.Module) -> str:
    names: dict[int, str] = {id(found): name for name, found in model.named_modules()}
    return names[id(module)]
