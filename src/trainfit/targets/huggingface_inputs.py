"""Training inputs for a Hugging Face model, with labels, so that the model itself returns the loss."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainfit.errors import OptionError, TargetError
from trainfit.models.recipe import StepOptions
from trainfit.targets.huggingface_tasks import Task
from trainfit.targets.inputs import masked_labels, random_classes, random_images, random_tokens

Inputs = dict[str, Tensor | bool]

_DEFAULT_BATCH = 8
_DEFAULT_SEQ = 1024
_DEFAULT_IMAGE_SIZE = 224
_DEFAULT_AUDIO_SAMPLES = 160_000  # ten seconds at 16 kHz
_CHOICES = 4

_TEXT_TASKS = ("text-classification", "token-classification", "question-answering", "multiple-choice")
_AUDIO_TASKS = ("ctc", "audio-classification")
# Models of two encoders that take an image and a text as they are, and compute a loss themselves.
_IMAGE_TEXT_PAIRS = {"align", "altclip", "blip", "chinese_clip", "clip", "clipseg", "metaclip_2", "siglip"}

# These count positions from the padding id + 1: the position embeddings before that are never used.
_POSITIONS_AFTER_PADDING = {
    *("altclip", "camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke"),
    *("markuplm", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
}


def fill_sizes(config: Any, task: Task, options: StepOptions) -> StepOptions:
    """Fill in the sizes that the user left open, and refuse those that the model cannot take."""
    options = replace(options, batch=options.batch or _DEFAULT_BATCH)
    if task.name == "image-classification":
        options.refuse("seq", "an image model, which takes --image-size")
        _check_patches(_seeing(config), options.image_size)
        return options
    if task.name == "image-text-contrast":
        if config.model_type not in _IMAGE_TEXT_PAIRS:
            raise _unknown_inputs(f"inputs of {config.model_type} for image-text-contrast")
        _check_patches(_seeing(config), options.image_size)
        return replace(options, seq=_sequence_length(config, options.seq))
    options.refuse("image_size", f"the task {task.name}, which takes --seq")
    if task.name in _AUDIO_TASKS:
        return replace(options, seq=_audio_samples(config, options.seq))
    if task.name == "speech-seq2seq":
        _feature_shape(config)
    _vocab_size(config)
    return replace(options, seq=_sequence_length(config, options.seq))


def fit_config(config: Any, task: Task, options: StepOptions) -> Any:
    """Return a copy of `config` with the values that training with these options needs."""
    fitted = copy.deepcopy(config)
    seeing = _seeing(fitted)
    if options.image_size is not None and hasattr(seeing, "image_size"):
        is_pair = isinstance(seeing.image_size, list | tuple)
        seeing.image_size = [options.image_size] * 2 if is_pair else options.image_size
    # Without them the model cannot shift labels into decoder inputs, or find the end of a padded text.
    if task.name in ("seq2seq-lm", "speech-seq2seq", *_TEXT_TASKS):
        for part in (fitted, fitted.get_text_config()):
            if getattr(part, "pad_token_id", None) is None:
                part.pad_token_id = 0
            if getattr(part, "decoder_start_token_id", None) is None:
                part.decoder_start_token_id = part.pad_token_id
    return fitted


def make_inputs(config: Any, task: Task, options: StepOptions) -> Inputs:
    """Make random inputs and labels for one step, of the sizes that `fill_sizes` returned."""
    batch, device, dtype = _batch(options), options.device, options.parameter_dtype
    match task.name:
        case "causal-lm":
            tokens = _tokens(config, options)
            return {"input_ids": tokens, "labels": tokens}
        case "masked-lm":
            tokens = _tokens(config, options)
            return {"input_ids": tokens, "labels": masked_labels(tokens)}
        case "seq2seq-lm":  # the model makes the decoder's inputs by shifting the labels
            return {"input_ids": _tokens(config, options), "labels": _tokens(config, options)}
        case "text-classification":
            return {"input_ids": _ended_tokens(config, options), "labels": _class_labels(config, options)}
        case "token-classification":
            tokens = _tokens(config, options)
            labels = torch.randint(0, config.num_labels, tokens.shape, device=device)
            return {"input_ids": tokens, "labels": labels}
        case "question-answering":
            first = random_classes(batch, _seq(options), device)
            return {"input_ids": _tokens(config, options), "start_positions": first, "end_positions": first}
        case "multiple-choice":
            tokens = torch.stack([_tokens(config, options) for _ in range(_CHOICES)], dim=1)
            return {"input_ids": tokens, "labels": random_classes(batch, _CHOICES, device)}
        case "image-classification":
            return {"pixel_values": _images(config, options), "labels": _class_labels(config, options)}
        case "image-text-contrast":
            tokens = _tokens(config, options)
            return {"input_ids": tokens, "pixel_values": _images(config, options), "return_loss": True}
        case "speech-seq2seq":
            features = torch.randn(batch, *_feature_shape(config), device=device, dtype=dtype)
            return {"input_features": features, "labels": _tokens(config, options)}
        case "audio-classification":
            return {"input_values": _audio(options), "labels": _class_labels(config, options)}
        case "ctc":
            # CTC needs a blank between equal neighbours: half as many labels as frames always fit.
            length = max(1, _audio_frames(config, _seq(options)) // 2)
            labels = torch.randint(1, _vocab_size(config), (batch, length), device=device)  # 0 is blank
            return {"input_values": _audio(options), "labels": labels}


def _ended_tokens(config: Any, options: StepOptions) -> Tensor:
    tokens = _tokens(config, options)
    if config.is_encoder_decoder and config.eos_token_id is not None:
        # Such a classifier reads the position of the end token, of which every text must have one.
        tokens = tokens.masked_fill(tokens == config.eos_token_id, 0 if config.eos_token_id else 1)
        tokens[:, -1] = config.eos_token_id
    return tokens


def _audio(options: StepOptions) -> Tensor:
    return torch.randn(_batch(options), _seq(options), device=options.device, dtype=options.parameter_dtype)


def _images(config: Any, options: StepOptions) -> Tensor:
    seeing = _seeing(config)
    height, width = _image_sides(seeing, options.image_size)
    return random_images(_batch(options), getattr(seeing, "num_channels", 3), height, width, options)


def _seeing(config: Any) -> Any:
    """Return the part of a config that is about images."""
    return getattr(config, "vision_config", None) or config


def _tokens(config: Any, options: StepOptions) -> Tensor:
    return random_tokens(_batch(options), _seq(options), _vocab_size(config), options.device)


def _class_labels(config: Any, options: StepOptions) -> Tensor:
    """Label each example as the config's problem type wants it; one label alone means regression."""
    batch = _batch(options)
    if config.problem_type == "multi_label_classification":
        return torch.zeros(batch, config.num_labels, device=options.device, dtype=options.parameter_dtype)
    if config.problem_type == "regression" or config.num_labels == 1:
        shape = (batch,) if config.num_labels == 1 else (batch, config.num_labels)
        return torch.randn(shape, device=options.device, dtype=options.parameter_dtype)
    return random_classes(batch, config.num_labels, options.device)


def _batch(options: StepOptions) -> int:
    assert options.batch is not None, "filled in by fill_sizes"
    return options.batch


def _seq(options: StepOptions) -> int:
    assert options.seq is not None, "filled in by fill_sizes"
    return options.seq


def _vocab_size(config: Any) -> int:
    size = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    if not isinstance(size, int) or size < 2:
        raise TargetError(f"the config of {config.model_type} gives no vocab_size to draw tokens from.")
    return size


def _sequence_length(config: Any, requested: int | None) -> int:
    longest = _longest_sequence(config)
    if requested is None:
        return _DEFAULT_SEQ if longest is None else min(_DEFAULT_SEQ, longest)
    if longest is not None and requested > longest:
        raise OptionError(
            f"--seq {requested} is longer than the {longest} positions of this config; "
            "pass a shorter one, or raise its max_position_embeddings."
        )
    return requested


def _longest_sequence(config: Any) -> int | None:
    """Return how many tokens the model has positions for; None if its positions are relative."""
    text = config.get_text_config(decoder=True)
    for name in ("max_target_positions", "max_position_embeddings"):
        positions = getattr(text, name, None)
        if isinstance(positions, int) and positions > 0:
            reserved = (text.pad_token_id or 0) + 1 if config.model_type in _POSITIONS_AFTER_PADDING else 0
            return positions - reserved
    return None


def _image_sides(config: Any, requested: int | None) -> tuple[int, int]:
    size = requested or getattr(config, "image_size", None) or _DEFAULT_IMAGE_SIZE
    if isinstance(size, list | tuple):
        return int(size[0]), int(size[1])
    return int(size), int(size)


def _unknown_inputs(which: str) -> TargetError:
    return TargetError(
        f"trainfit does not know the {which}; write the step yourself and use file.py:function."
    )


def _check_patches(config: Any, requested: int | None) -> None:
    patch = getattr(config, "patch_size", None)
    if requested is not None and isinstance(patch, int) and requested % patch:
        raise OptionError(f"--image-size {requested} is not a multiple of the patch size {patch}.")


def _feature_shape(config: Any) -> tuple[int, int]:
    """Return mel bins and frames of a spectrogram; Whisper's encoder halves the frames once."""
    bins, positions = (getattr(config, name, None) for name in ("num_mel_bins", "max_source_positions"))
    if config.model_type != "whisper" or not isinstance(bins, int) or not isinstance(positions, int):
        raise _unknown_inputs(f"audio inputs of {config.model_type}")
    return bins, 2 * positions


def _audio_samples(config: Any, requested: int | None) -> int:
    if getattr(config, "conv_kernel", None) is None or getattr(config, "conv_stride", None) is None:
        raise _unknown_inputs(f"audio inputs of {config.model_type}")
    samples = requested or _DEFAULT_AUDIO_SAMPLES
    # Training masks stretches of this many frames and needs room for one.
    fewest_frames = getattr(config, "mask_time_length", 0) + 1
    if _audio_frames(config, samples) < fewest_frames:
        raise OptionError(
            f"--seq {samples} audio samples are too few for this model; "
            f"the least is {_samples_of(config, fewest_frames)}."
        )
    return samples


def _audio_frames(config: Any, samples: int) -> int:
    """Return how many frames the convolutions of a wav2vec2-like model leave."""
    length = samples
    for kernel, stride in zip(config.conv_kernel, config.conv_stride):
        length = (length - kernel) // stride + 1
    return length


def _samples_of(config: Any, frames: int) -> int:
    length = frames
    for kernel, stride in reversed(list(zip(config.conv_kernel, config.conv_stride))):
        length = (length - 1) * stride + kernel
    return int(length)
