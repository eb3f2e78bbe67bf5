"""What a Hugging Face model can be trained for, and how a config says which."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from trainfit.errors import OptionError, TargetError

TaskName = Literal[
    "speech-seq2seq",
    "seq2seq-lm",
    "masked-lm",
    "causal-lm",
    "image-text-contrast",
    "image-classification",
    "ctc",
    "text-classification",
    "token-classification",
    "question-answering",
    "multiple-choice",
    "audio-classification",
]


@dataclass(frozen=True)
class Task:
    """One training task: what transformers' class and table of models for it are called, without the rest."""

    name: TaskName
    class_suffix: str
    table_part: str

    @property
    def auto_class(self) -> str:
        """Transformers' class that builds a model for it."""
        return f"AutoModelFor{self.class_suffix}"

    @property
    def table(self) -> str:
        """Transformers' table of the models for it."""
        return f"MODEL_FOR_{self.table_part}_MAPPING_NAMES"


# In the order in which a model_type alone decides. An encoder-decoder is also listed as causal and masked
# (its halves), and an encoder also as causal (turned into a decoder): what it was made for comes first.
TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("speech-seq2seq", "SpeechSeq2Seq", "SPEECH_SEQ_2_SEQ"),
        Task("seq2seq-lm", "Seq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM"),
        Task("masked-lm", "MaskedLM", "MASKED_LM"),
        Task("causal-lm", "CausalLM", "CAUSAL_LM"),
        Task("image-text-contrast", "ZeroShotImageClassification", "ZERO_SHOT_IMAGE_CLASSIFICATION"),
        Task("image-classification", "ImageClassification", "IMAGE_CLASSIFICATION"),
        Task("ctc", "CTC", "CTC"),
        Task("text-classification", "SequenceClassification", "SEQUENCE_CLASSIFICATION"),
        Task("token-classification", "TokenClassification", "TOKEN_CLASSIFICATION"),
        Task("question-answering", "QuestionAnswering", "QUESTION_ANSWERING"),
        Task("multiple-choice", "MultipleChoice", "MULTIPLE_CHOICE"),
        Task("audio-classification", "AudioClassification", "AUDIO_CLASSIFICATION"),
    )
}

# What a model that sees or hears has besides its text: without such inputs a part of it would not run.
_OTHER_SENSES = ("vision_config", "audio_config", "speech_config")
_TEXT_ALONE = ("seq2seq-lm", "masked-lm", "causal-lm", "text-classification", "token-classification")


def choose_task(config: Any, requested: str | None, file: Path) -> Task:
    """Return the task to train: the one requested, else the architecture's, else the model type's.

    A class that the config names is trained as itself or not at all: a bare model, or one for another task,
    is refused with the tasks that there are for its model type.
    """
    possible = [task for task in TASKS.values() if config.model_type in _table(task)]
    if requested is not None:
        return _requested_task(config, requested, possible)
    architecture = _architecture(config)
    for task in possible:
        if architecture in _class_names(_table(task)[config.model_type]):
            return _with_all_senses(config, task, possible, file)
    if architecture is not None:
        raise TargetError(
            f"{file} is for {architecture}, whose training inputs trainfit does not know. {_advice(possible)}"
        )
    if not possible:
        raise TargetError(
            f"{file}: there is no training task for model_type {config.model_type!r}. {_advice(possible)}"
        )
    return _with_all_senses(config, possible[0], possible, file)


def _with_all_senses(config: Any, task: Task, possible: list[Task], file: Path) -> Task:
    """Refuse to train a model that also sees or hears on text alone, unless that is asked for."""
    others = [name for name in _OTHER_SENSES if getattr(config, name, None) is not None]
    if task.name in _TEXT_ALONE and others:
        raise TargetError(
            f"{file}: a {config.model_type} model takes more than text ({', '.join(others)}), and trainfit "
            f"does not know those inputs. {_advice(possible)} A task trains it on text alone."
        )
    return task


def _requested_task(config: Any, requested: str, possible: list[Task]) -> Task:
    if requested not in TASKS:
        raise OptionError(f"--task must be one of {', '.join(get_args(TaskName))}, got {requested!r}.")
    if TASKS[requested] not in possible:
        raise TargetError(
            f"transformers has no {config.model_type} model for the task {requested}. {_advice(possible)}"
        )
    return TASKS[requested]


def _architecture(config: Any) -> str | None:
    architectures = config.architectures
    if isinstance(architectures, str):
        return architectures
    return str(architectures[0]) if architectures else None


def _table(task: Task) -> dict[str, str | tuple[str, ...]]:
    from transformers.models.auto import modeling_auto

    table: dict[str, str | tuple[str, ...]] = getattr(modeling_auto, task.table)
    return table


def _class_names(entry: str | tuple[str, ...]) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _advice(possible: list[Task]) -> str:
    own_function = "write the step yourself and use file.py:function"
    if not possible:
        return f"{own_function.capitalize()}."
    *most, last = [task.name for task in possible]
    named = f"{', '.join(most)} or {last}" if most else last
    return f"Pass --task {named}, or {own_function}."
