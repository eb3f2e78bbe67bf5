"""Targets that are a Hugging Face config: the model is built from it with fresh weights, offline."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainfit.errors import MissingExtra, OptionError, TargetError, TrainfitError
from trainfit.models.recipe import DEFAULT_OPTIMIZER, StepOptions
from trainfit.steps.step import Step
from trainfit.targets.divided import step_maker
from trainfit.targets.given_values import converted, refuse_unknown
from trainfit.targets.huggingface_inputs import fill_sizes, fit_config, make_inputs
from trainfit.targets.huggingface_tasks import Task, choose_task
from trainfit.targets.target import Target
from trainfit.traces.settings import Settings, named

if TYPE_CHECKING:
    from trainfit.models.parallel.layout import Layout

INSTALL_LINE = "pip install -c constraints.txt 'trainfit[hf]'"
_OLDEST_VERSION = 5
_SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "vocab_size", "num_local_experts"),
)


def load_config(name: str, options: StepOptions, task: str | None) -> Target:
    """Read the config that `name` (`hf:...`) says.

    The config, the task and the options are checked now; the model is built when the function is called.
    """
    transformers = _import_transformers()
    file = _config_file(name.removeprefix("hf:"))
    config = _changed(transformers, _parse(transformers, file, _read_json_object(file)), file, options.set)
    chosen = choose_task(config, task, file)
    options = fill_sizes(config, chosen, _with_dtype(config, options))
    make_step = step_maker(name, partial(_layout, name, config, chosen.name), options)

    def build() -> Step:
        # Fitted anew each time, because transformers writes the dtype it was given into the config.
        fitted = fit_config(config, chosen, options)
        model = _make_model(transformers, fitted, chosen, options.parameter_dtype)
        if task is None:
            _refuse_other_class(model, fitted)
        return make_step(model, make_inputs(fitted, chosen, options))

    settings = Settings(
        batch=options.batch,
        seq=options.seq,
        image_size=options.image_size,
        optimizer=options.optimizer or DEFAULT_OPTIMIZER,
        task=chosen.name,
        model=named(_telling(config)),
    )
    return Target(name, build, "hf", settings)


def _layout(name: str, config: Any, task: str) -> Layout:
    from trainfit.targets.huggingface_layout import TransformersLayout  # takes seconds to load

    return TransformersLayout(name, config, task)


def _telling(config: Any) -> dict[str, Any]:
    """Return the values of a config that say most about the model's size."""
    text = config.get_text_config()
    sizes = {name: getattr(text, name, None) for name in _SIZES}
    return {"model_type": config.model_type} | {n: size for n, size in sizes.items() if type(size) is int}


def _changed(transformers: ModuleType, config: Any, file: Path, changes: Mapping[str, Any]) -> Any:
    """Return the config with what `--set` gives; `text_config.hidden_size` is one of a config inside."""
    if not changes:
        return config
    known, values = config.to_dict(), _read_json_object(file)
    for given, value in changes.items():
        *path, last = given.split(".")
        last = config.attribute_map.get(last, last)  # the same under another name, such as n_embd
        inside, changed = known, values
        for part in path:
            inside = inside.get(part)
            changed = changed.setdefault(part, {})
            if not isinstance(inside, dict) or not isinstance(changed, dict):
                raise OptionError(f"--set {given}: {file} has no config {part!r} inside it.")
        refuse_unknown({last: value}, sorted(inside), f"the config of {config.model_type}")
        kind = None if inside[last] is None else type(inside[last])
        changed[last] = converted(given, value, kind)
    return _parse(transformers, file, values)


def _import_transformers() -> ModuleType:
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise TargetError(f"transformers is installed but cannot be imported: {error}") from error
        raise MissingExtra(
            f"hf: targets need transformers, which is not installed:\n  {INSTALL_LINE}"
        ) from None
    if int(transformers.__version__.partition(".")[0]) < _OLDEST_VERSION:
        raise MissingExtra(
            f"hf: targets need transformers {_OLDEST_VERSION} or newer, not {transformers.__version__}:\n"
            f"  {INSTALL_LINE}"
        )
    module: ModuleType = transformers
    return module


def _config_file(location: str) -> Path:
    if not location:
        raise TargetError(
            "hf: needs a config.json or the folder that holds one, as in hf:my-model/config.json."
        )
    path = Path(os.path.expanduser(location))
    file = path / "config.json" if os.path.isdir(path) else path
    if os.path.isfile(file):
        return file
    if os.path.isdir(path):
        raise TargetError(f"the folder {location!r} holds no config.json.")
    raise TargetError(
        f"there is no file or folder {location!r}, and trainfit does not download. For a model on the hub, "
        f"fetch its config first: hf download OWNER/NAME config.json --local-dir FOLDER, then use hf:FOLDER."
    )


def _parse(transformers: ModuleType, file: Path, values: dict[str, Any]) -> Any:
    model_type = values.get("model_type")
    known = transformers.CONFIG_MAPPING
    if not isinstance(model_type, str):
        raise TargetError(f'{file} has no "model_type", so it is not the config of a transformers model.')
    if model_type not in known:
        close = difflib.get_close_matches(model_type, list(known), n=3)
        meant = f" Did you mean {' or '.join(close)}?" if close else ""
        remote = " Code that a config names is never run." if "auto_map" in values else ""
        raise TargetError(
            f"{file}: transformers {transformers.__version__} has no model_type {model_type!r:.80}.{meant}"
            f"{remote}"
        )
    try:
        config = known[model_type].from_dict(values)
    except Exception as error:
        raise TargetError(f"{file}: transformers refuses this config: {_one_line(error)}") from error
    for part in (config, config.get_text_config()):
        if getattr(part, "use_cache", False):
            part.use_cache = False  # a cache is for generating; in training it would only hold memory
    return config


def _read_json_object(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise TargetError(f"{file} is not readable as JSON: {error}") from None
    if not isinstance(values, dict):
        raise TargetError(f"{file} holds a JSON {type(values).__name__}, not an object.")
    return values


def _with_dtype(config: Any, options: StepOptions) -> StepOptions:
    """Without --dtype, take what the config says, as transformers itself does.

    Float16 weights cannot be trained as they are; bfloat16 is the 16-bit type that can.
    """
    if options.dtype is not None:
        return options
    return replace(options, dtype="bf16" if config.dtype in (torch.bfloat16, torch.float16) else "fp32")


def _make_model(transformers: ModuleType, config: Any, task: Task, dtype: torch.dtype) -> nn.Module:
    auto_class = getattr(transformers, task.auto_class)
    try:
        with _offline():
            model: nn.Module = auto_class.from_config(config, dtype=dtype, trust_remote_code=False)
    except (TrainfitError, AssertionError):
        raise
    except Exception as error:
        raise TargetError(
            f"transformers cannot build {config.model_type} for {task.name}: {_one_line(error)}"
        ) from error
    return model


def _refuse_other_class(model: nn.Module, config: Any) -> None:
    """Never train another class than the one that the config names, unless a task was asked for."""
    built = type(model).__name__
    if config.architectures and built not in config.architectures:
        raise TargetError(
            f"the config is for {config.architectures[0]}, but transformers builds a {built} from it; "
            "pass --task to train that, or write the step yourself and use file.py:function."
        )


@contextmanager
def _offline() -> Iterator[None]:
    """Keep transformers from downloading inside the block (kernels, backbones)."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}"
