"""Read a target as the user gives it, and hand it to the loader of its kind."""

from __future__ import annotations

import os
from collections.abc import Callable

from trainfit.errors import OptionError, StepError, TargetError
from trainfit.models.recipe import StepOptions
from trainfit.steps.step import Step
from trainfit.targets.built_in import load_built_in
from trainfit.targets.huggingface import load_config
from trainfit.targets.target import Kind, Target
from trainfit.targets.user_code import load_file, load_function, load_module

FORMS = "file.py:function, package.module:function, hf:DIRECTORY-or-config.json, or a built-in model's name"


def load(target: str | Callable[..., Step], options: StepOptions, task: str | None = None) -> Target:
    """Find what `target` names and check the options against it, without building the model yet.

    `task` says what an `hf:` model is trained for; other targets know it themselves.
    """
    if isinstance(target, Step):
        raise StepError(
            "a Step with real tensors was passed where the step is still to be built; "
            "pass the function that builds it, so that it can be called without allocating anything."
        )
    kind = _kind_of(target) if isinstance(target, str) else "function"
    if task is not None and kind != "hf":
        named = target if isinstance(target, str) else getattr(target, "__name__", "a function")
        raise OptionError(f"--task applies to hf: targets only, and {named!r} is not one.")
    if not isinstance(target, str):
        return load_function(target, options)
    if kind == "hf":
        return load_config(target, options, task)
    if kind == "built-in":
        return load_built_in(target, options)
    place, _, function = target.rpartition(":")
    if not function.isidentifier():
        raise TargetError(f"{target!r} needs the name of a function after the colon, as in {place}:build.")
    load_named = load_file if kind == "file" else load_module
    return load_named(place, function, options)


def _kind_of(target: str) -> Kind:
    if not target.strip():
        raise TargetError(f"the target is empty; give {FORMS}.")
    if target.startswith("hf:"):
        return "hf"
    place, colon, _ = target.rpartition(":")
    if colon:
        return "file" if place.endswith(".py") or _is_path(place) else "module"
    if target.endswith(".py"):
        raise TargetError(
            f"{target!r} names a file but no function in it; add the one that returns the step, "
            f"as in {target}:build."
        )
    if _is_path(target) or target.endswith(".json") or os.path.isdir(target):
        raise TargetError(f"{target!r} is a path; for a Hugging Face config write hf:{target}.")
    return "built-in"


def _is_path(text: str) -> bool:
    return "/" in text or os.sep in text
