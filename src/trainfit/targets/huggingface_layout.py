"""How transformers models are divided over a mesh: by their own tensor-parallel plan, and layer by layer."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from trainfit.models.losses import next_token_loss
from trainfit.models.parallel.divided_sequence import SequenceInputs, refuse_sequences
from trainfit.models.parallel.layout import Layout, not_a_multiple
from trainfit.models.parallel.pipeline import Handover, PairLoss, stage_blocks
from trainfit.models.parallel.tensor_styles import Copied
from trainfit.models.recipe import StepOptions
from trainfit.targets.huggingface_stage import TransformersPart, stages_are_known

_DIVIDED = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key and value heads",
    "intermediate_size": "columns of the feed-forward",
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_SUMMED = "replicated_with_grad_allreduce"
"""What transformers calls modules of which every rank computes a part of the gradient."""


class TransformersLayout(Layout):
    """How a transformers model is divided. Its plan gathers the logits, so that the loss is whole."""

    loss_in_parts = False
    sequence = SequenceInputs("input_ids", "position_ids", causal=True, mask="attention_mask")

    def __init__(self, name: str, config: Any, task: str) -> None:
        self.name, self.config, self.task = f"{name} ({config.model_type})", config, task
        self.loss = next_token_loss
        self._tied = False

    @property
    def experts(self) -> int:
        """How many experts each mixture has; 0 if there are none."""
        text = self.config.get_text_config()
        return next((count for name in _EXPERTS if type(count := getattr(text, name, None)) is int), 0)

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
        text = self.config.get_text_config()
        kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
        if self.task != "causal-lm" or text is not self.config:
            return "only causal language models are, whose tokens see all those before them"
        if kinds or (not hasattr(text, "layer_types") and getattr(text, "sliding_window", None)):
            return f"torch divides full attention only, and it has {', '.join(sorted(kinds)) or 'a window'}"
        if not {"position_ids", "attention_mask"} <= _arguments(self.config):
            return "it takes no positions, so that a rank cannot say which part of the sequence it has"
        return refuse_sequences("tokens", options.seq or 0, size, causal=True, device=options.device_type)

    def no_pipeline(self, size: int, options: StepOptions) -> str | None:
        """Say why the model cannot be cut into so many stages; None if it can."""
        if self.task != "causal-lm" or not stages_are_known(self.config):
            return (
                "only causal language models are cut for which transformers has a plan (base_model_pp_plan); "
                "write the step yourself"
            )
        layers: int = self.config.num_hidden_layers
        return f"it has {layers} layers, fewer than there are stages" if layers < size else None

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the layers that transformers itself does not split; else those of the longest lists."""
        if isinstance(model, TransformersPart):
            model = model.model
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

        if isinstance(model, TransformersPart):
            model = model.model
        known, apply_plan = cast(Any, model), cast(Any, apply_tensor_parallelism)
        # Whole on every rank, but computing with a part of the heads: ours do that on DTensors.
        summed = {name for name, style in known.tp_plan.items() if style == _SUMMED}
        plan = {name: style for name, style in known.tp_plan.items() if name not in summed}
        tied = _tied_head(model)
        if tied is not None:
            # A head that is divided along the vocabulary takes the embedding along.
            plan[_name_in(model, tied[0])] = "embedding_rowwise"
        # With a number in the place of each star; a weight that is shared has one name only.
        names = {name for name, _ in (*model.named_modules(), *model.named_parameters())}
        numbered = known._expand_parallel_plan(plan).items()
        apply_plan(model, mesh, {name: style for name, style in numbered if name in names})
        if tied is not None:
            tied[1].register_parameter("weight", tied[0].get_parameter("weight"))
        for name, module in model.named_modules():
            if any(not isinstance(own, DTensor) for own in module.parameters(recurse=False)):
                is_summed = _name_in_plan(name) in summed
                parallelize_module(module, mesh, Copied(partial_gradients=is_summed))

    def stage(
        self, model: nn.Module, number: int, stages: int, seq: int, places: dict[str, Tensor]
    ) -> nn.Module:
        """Return what one stage of a pipeline runs; what other stages have is let go."""
        self._tied = _shares_weight(model)
        numbers = stage_blocks(self.config.num_hidden_layers, number, stages)
        return TransformersPart(model, numbers, number == 0, number == stages - 1, places)

    def tied_end(self, stage: nn.Module) -> nn.Module | None:
        """Return the module of a stage whose weight the other end of the pipeline has, too; None if none."""
        assert isinstance(stage, TransformersPart)
        if not self._tied or not (stage.is_first or stage.is_last):
            return None
        model: Any = stage.model
        end: nn.Module = model.get_input_embeddings() if stage.is_first else model.get_output_embeddings()
        return end

    def handover(self, tensor: DeviceMesh | None, options: StepOptions, loss: PairLoss) -> Handover:
        """Return what the stages of a pipeline hand to each other: whole, also where layers are divided."""
        seq, dtype = options.seq or 0, options.autocast_dtype or options.parameter_dtype
        hidden, vocabulary = self.config.hidden_size, self.config.vocab_size
        return Handover((1, seq, hidden), (1, seq, vocabulary), dtype, loss)


def _arguments(config: Any) -> set[str]:
    """Return what a causal language model of the architecture takes."""
    from transformers import AutoModelForCausalLM

    kinds: Any = AutoModelForCausalLM
    return set(inspect.signature(kinds._model_mapping[type(config)].forward).parameters)


def _shares_weight(model: Any) -> bool:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return head is not None and getattr(head, "weight", None) is getattr(embedding, "weight", None)


def _tied_head(model: Any) -> tuple[nn.Module, nn.Module] | None:
    """Return the embedding and the head, if they share their weight and the plan divides the head."""
    if not _shares_weight(model):
        return None
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return (embedding, head) if _name_in(model, head) in model.tp_plan else None


def _name_in_plan(name: str) -> str:
    """Return what a plan calls the module: it has a star for the number of a layer."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _name_in(model: nn.Module, module: nn.Module) -> str:
    names: dict[int, str] = {id(found): name for name, found in model.named_modules()}
    return names[id(module)]
