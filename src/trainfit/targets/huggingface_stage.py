"""The part of a transformers model that one stage of a pipeline runs.

The model stays as it is, with its own forward; layers of other stages let pass what they are given, so that
those that are there keep their numbers and names. The first stage has the embedding, the last one the norm
and the head: so transformers' own plan for pipelines says (`base_model_pp_plan`).
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from trainfit.errors import OptionError

_FIRST, _LAYERS, _LAST = "embed_tokens", "layers", "norm"


def stages_are_known(config: Any) -> bool:
    """Whether transformers has a plan for pipelines of the architecture, of the usual kind."""
    plan = getattr(config.get_text_config(), "base_model_pp_plan", None) or {}
    return config.get_text_config() is config and set(plan) == {_FIRST, _LAYERS, _LAST}


class TransformersPart(nn.Module):
    """What one stage has of a causal language model."""

    def __init__(
        self,
        model: nn.Module,
        numbers: range,
        is_first: bool,
        is_last: bool,
        others: dict[str, Tensor],
    ) -> None:
        """Let go of what other stages have. `others` are further inputs of the model, such as positions."""
        super().__init__()
        self.model, self.is_first, self.is_last = model, is_first, is_last
        self.others = others
        base: nn.Module = cast(Any, model).base_model
        layers = cast(nn.ModuleList, base.get_submodule(_LAYERS))
        for number in range(len(layers)):
            if number not in numbers:
                layers[number] = OtherStage()
        if not is_first:
            setattr(base, _FIRST, None)
            layers[0].register_forward_pre_hook(self._check_received, with_kwargs=True)
        if not is_last:
            setattr(base, _LAST, nn.Identity())
            cast(Any, model).set_output_embeddings(None)

    def forward(self, received: Tensor) -> Tensor:
        """Run the stage on what the one before returned."""
        self._received = received
        model: Any = self.model
        given = {"input_ids" if self.is_first else "inputs_embeds": received, **self.others}
        result: Tensor = model(**given).logits if self.is_last else model.base_model(**given)[0]
        del self._received
        return result

    def _check_received(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if hidden is not self._received:
            raise OptionError(
                f"{type(self.model).__name__} changes what it is given before its first layer (a scale, or "
                "positions), which the stages of a pipeline would repeat: write the step yourself."
            )


class OtherStage(nn.Module):
    """In the place of a layer that another stage has."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return what it is given."""
        return hidden_states
