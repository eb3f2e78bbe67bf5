"""Read a target as the user types it, and hand it to the loader of its kind."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainfit.errors import OptionError, TargetError
from trainfit.models.recipe import StepOptions
from trainfit.step import Step
from trainfit.targets.built_in import load_built_in
from trainfit.targets.huggingface import load_config
from trainfit.targets.user_code import load_file, load_module

Kind = Literal["file", "module", "hf", "built-in"]

FORMS = "file.py:function, package.module:function, hf:DIRECTORY-or-config.json, or a built-in model's name"


@dataclass(frozen=True)
class Target:
    """Something trainfit can capture. `build` makes a fresh step each time it is called."""

    name: str
    build: Callable[[], Step]
    kind: Kind


def load(target: str, options: StepOptions, task: str | None = None) -> Target:
    """Find what `target` names and check the options against it, without building the model yet.

    `task` says what an `hf:` model is trained for; other targets know it themselves.
    """
    kind = _kind_of(target)
    if task is not None and kind != "hf":
        raise OptionError(f"--task applies to hf: targets only, and {target!r} is not one.")
    if kind == "hf":
        return Target(target, load_config(target.removeprefix("hf:"), options, task), kind)
    if kind == "built-in":
        return Target(target, load_built_in(target, options), kind)
    place, _, function = target.rpartition(":")
    if not function.isidentifier():
        raise TargetError(f"{target!r} needs the name of a function after the colon, as in {place}:build.")
    load_function = load_file if kind == "file" else load_module
    return Target(target, load_function(place, function, options), kind)


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
    if _is_path(target) or target.endswith(".json") or Path(target).is_dir():
        raise TargetError(f"{target!r} is a path; for a Hugging Face config write hf:{target}.")
    return "built-in"


def _is_path(text: str) -> bool:
    return "/" in text or os.sep in text
