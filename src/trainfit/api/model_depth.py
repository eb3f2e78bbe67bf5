"""How many layers a model has, and by which setting it would have fewer."""

from __future__ import annotations

from trainfit.targets import Target

_DEPTH_SETTINGS = ("layers", "num_hidden_layers", "n_layer", "num_layers")
"""What built-in models and configs call their depth."""


def model_depth(target: Target) -> tuple[str, int] | None:
    """Return the setting that says how deep a model is, and its value.

    None for a function of the user's own, which has no such setting, and for models whose layers are counted
    in another way.
    """
    if target.kind not in ("built-in", "hf"):
        return None
    settings = dict(target.settings.model)
    name = next((name for name in _DEPTH_SETTINGS if settings.get(name, "").isdecimal()), None)
    return None if name is None else (name, int(settings[name]))
