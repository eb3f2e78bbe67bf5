"""Hugging Face architectures that see, hear, combine several senses, or forecast time series.

The tables work as in `huggingface`: `{model_type: sizes}`, and one function that knows the inputs.
"""

from __future__ import annotations

from typing import Any

import torch

from trainfit import Step

from .huggingface import (
    BERT_LIKE,
    LLAMA_LIKE,
    SPECIAL_TOKENS,
    Build,
    Sizes,
    cases_of,
    create,
    mean_of_hidden,
    random_tokens,
    training_step,
)

# -------------------------------------------------------------------------------------- images, videos


def image_classifier(
    model_type: str,
    batch: int = 8,
    image_size: int = 96,
    model_class: str = "AutoModelForImageClassification",
    optimizer: str = "adamw",
    **sizes: Any,
) -> Build:
    """One label for each image."""

    def build() -> Step:
        sized = {"image_size": image_size, **sizes, "num_labels": 10}
        model = create(model_class, model_type, sized)
        inputs = {
            "pixel_values": torch.randn(batch, 3, image_size, image_size),
            "labels": torch.randint(0, 10, (batch,)),
        }
        return training_step(model, inputs, optimizer)

    return build


def image_features(
    model_type: str,
    batch: int = 8,
    image_size: int = 96,
    model_class: str = "AutoModel",
    optimizer: str = "adamw",
    **sizes: Any,
) -> Build:
    """An image backbone trained on its features alone."""

    def build() -> Step:
        model = create(model_class, model_type, {**sizes, "image_size": image_size})
        inputs = {"pixel_values": torch.randn(batch, 3, image_size, image_size)}
        return training_step(model, inputs, optimizer, loss=mean_of_hidden)

    return build


def masked_image(
    model_type: str, batch: int = 8, image_size: int = 96, optimizer: str = "adamw", **sizes: Any
) -> Build:
    """Reconstruction of the hidden patches of an image (masked autoencoder)."""

    def build() -> Step:
        model = create("AutoModelForPreTraining", model_type, {**sizes, "image_size": image_size})
        images = torch.randn(batch, 3, image_size, image_size)
        return training_step(model, {"pixel_values": images}, optimizer)

    return build


def segmentation(
    model_type: str, batch: int = 4, image_size: int = 128, optimizer: str = "adamw", **sizes: Any
) -> Build:
    """One label for each pixel."""

    def build() -> Step:
        model = create("AutoModelForSemanticSegmentation", model_type, {**sizes, "num_labels": 10})
        inputs = {
            "pixel_values": torch.randn(batch, 3, image_size, image_size),
            "labels": torch.randint(0, 10, (batch, image_size, image_size)),
        }
        return training_step(model, inputs, optimizer)

    return build


def depth_estimation(
    model_type: str, batch: int = 4, image_size: int = 128, optimizer: str = "adamw", **sizes: Any
) -> Build:
    """A distance for each pixel."""

    def build() -> Step:
        model = create("AutoModelForDepthEstimation", model_type, sizes)
        inputs = {
            "pixel_values": torch.randn(batch, 3, image_size, image_size),
            "labels": torch.rand(batch, image_size, image_size) + 0.1,
        }
        return training_step(model, inputs, optimizer)

    return build


def super_resolution(
    model_type: str, batch: int = 2, image_size: int = 48, optimizer: str = "adamw", **sizes: Any
) -> Build:
    """An image twice as large, compared with the true one pixel by pixel."""

    def build() -> Step:
        model = create("AutoModelForImageToImage", model_type, {**sizes, "image_size": image_size})
        truth = torch.rand(batch, 3, 2 * image_size, 2 * image_size)
        images = torch.rand(batch, 3, image_size, image_size)
        return training_step(
            model,
            {"pixel_values": images},
            optimizer,
            loss=lambda output: (output.reconstruction - truth).abs().mean(),
        )

    return build


def detection(
    model_type: str, batch: int = 2, image_size: int = 128, optimizer: str = "adamw", **sizes: Any
) -> Build:
    """Boxes and classes, against fixed targets for every query instead of matched ones."""

    def build() -> Step:
        sized = {**sizes, "image_size": [image_size, image_size], "num_labels": 10}
        model = create("AutoModelForObjectDetection", model_type, sized)

        def loss(output: Any) -> torch.Tensor:
            classes = torch.zeros(output.logits.shape[:2], dtype=torch.long)
            class_loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), classes.flatten())
            return class_loss + (output.pred_boxes - 0.5).abs().mean()

        inputs = {"pixel_values": torch.randn(batch, 3, image_size, image_size)}
        return training_step(model, inputs, optimizer, loss=loss)

    return build


def video_classifier(
    model_type: str, batch: int = 2, image_size: int = 64, optimizer: str = "adamw", **sizes: Any
) -> Build:
    """One label for each clip of a few frames."""

    def build() -> Step:
        sized = {**sizes, "image_size": image_size, "num_labels": 10}
        model = create("AutoModelForVideoClassification", model_type, sized)
        inputs = {
            "pixel_values": torch.randn(batch, sizes["num_frames"], 3, image_size, image_size),
            "labels": torch.randint(0, 10, (batch,)),
        }
        return training_step(model, inputs, optimizer)

    return build


VIT_LIKE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "patch_size": 8,
}
DINO_LIKE = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "patch_size": 8}
PYRAMID = {"depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 4, 8]}

VISION_TRANSFORMERS: dict[str, Sizes] = {
    "vit": VIT_LIKE,
    "deit": {**VIT_LIKE, "model_class": "DeiTForImageClassification", "optimizer": "momentum"},
    "beit": VIT_LIKE,
    "data2vec-vision": VIT_LIKE,
    "swin": {"embed_dim": 48, "depths": [2, 2, 2], "num_heads": [3, 6, 12], "window_size": 6},
    "swinv2": {"embed_dim": 48, "depths": [2, 2, 2], "num_heads": [3, 6, 12], "window_size": 6},
    "dinov2": DINO_LIKE,
    "dinov2_with_registers": DINO_LIKE,
    "ijepa": VIT_LIKE,
    "vit_msn": VIT_LIKE,
    "pvt": {**PYRAMID, "hidden_sizes": [32, 64, 128, 256]},
    "pvt_v2": {**PYRAMID, "hidden_sizes": [32, 64, 128, 256]},
    "cvt": {"embed_dim": [32, 64, 128], "num_heads": [1, 2, 4], "depth": [1, 2, 3]},
    "levit": {
        "hidden_sizes": [64, 96, 128],
        "num_attention_heads": [2, 3, 4],
        "depths": [2, 2, 2],
        "model_class": "LevitForImageClassification",
        "batch": 16,
    },
    "mobilevit": {
        "hidden_sizes": [48, 64, 80],
        "neck_hidden_sizes": [16, 24, 32, 48, 64, 80, 160],
        "image_size": 64,
    },
    "mobilevitv2": {"width_multiplier": 0.5, "image_size": 64},
}

CONVOLUTIONAL: dict[str, Sizes] = {
    "resnet": {"hidden_sizes": [64, 128, 256, 256], "depths": [1, 2, 2, 1], "embedding_size": 32},
    "convnext": {"hidden_sizes": [32, 64, 128, 256], "depths": [1, 1, 2, 1]},
    "convnextv2": {"hidden_sizes": [32, 64, 128, 256], "depths": [1, 1, 2, 1], "optimizer": "momentum"},
    "mobilenet_v1": {"depth_multiplier": 0.5, "optimizer": "momentum"},
    "mobilenet_v2": {"depth_multiplier": 0.5},
    "efficientnet": {
        "width_coefficient": 0.5,
        "depth_coefficient": 0.5,
        "hidden_dim": 640,
        "batch": 4,
    },
    "regnet": {"hidden_sizes": [32, 64, 128, 256], "depths": [1, 1, 2, 1], "groups_width": 16},
    "bit": {
        "hidden_sizes": [128, 256, 256, 256],
        "depths": [1, 1, 2, 1],
        "embedding_size": 32,
        "num_groups": 16,
    },
    "poolformer": {"hidden_sizes": [32, 64, 128, 256], "depths": [1, 1, 2, 1]},
    "focalnet": {"embed_dim": 32, "depths": [1, 1, 2, 1]},
    "swiftformer": {"embed_dims": [24, 32, 48, 96], "depths": [1, 1, 2, 1]},
}

VIDEO_TRANSFORMERS: dict[str, Sizes] = {
    "videomae": {**VIT_LIKE, "num_frames": 8, "batch": 4},
    "vivit": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_frames": 8,
        "tubelet_size": [2, 8, 8],
    },
    "timesformer": {**VIT_LIKE, "num_frames": 4},
}

# --------------------------------------------------------------------------------------------- audio


def speech_ctc(
    model_type: str, batch: int = 2, samples: int = 12000, optimizer: str = "adamw", **sizes: Any
) -> Build:
    """Transcription of a waveform with the CTC loss."""

    def build() -> Step:
        model = create("AutoModelForCTC", model_type, sizes)
        inputs = {"input_values": torch.randn(batch, samples), "labels": torch.randint(5, 30, (batch, 8))}
        return training_step(model, inputs, optimizer)

    return build


def speech_features_ctc(
    model_type: str,
    batch: int = 2,
    frames: int = 200,
    features: int = 80,
    optimizer: str = "adamw",
    **sizes: Any,
) -> Build:
    """Transcription of a spectrogram with the CTC loss."""

    def build() -> Step:
        model = create("AutoModelForCTC", model_type, sizes)
        inputs = {
            "input_features": torch.randn(batch, frames, features),
            "attention_mask": torch.ones(batch, frames, dtype=torch.long),
            "labels": torch.randint(5, 30, (batch, 8)),
        }
        return training_step(model, inputs, optimizer)

    return build


def speech_seq2seq(
    model_type: str,
    shape: tuple[int, ...],
    key: str = "input_features",
    batch: int = 2,
    target: int = 48,
    optimizer: str = "adamw",
    **sizes: Any,
) -> Build:
    """An encoder hears, a decoder writes; `shape` is that of one recording."""

    def build() -> Step:
        tokens = {**SPECIAL_TOKENS, "decoder_start_token_id": 1}
        model = create("AutoModelForSpeechSeq2Seq", model_type, {**tokens, **sizes})
        labels = random_tokens(sizes["vocab_size"], batch, target)
        return training_step(model, {key: torch.randn(batch, *shape), "labels": labels}, optimizer)

    return build


def audio_classifier(
    model_type: str, shape: tuple[int, ...], batch: int = 8, optimizer: str = "adamw", **sizes: Any
) -> Build:
    """One label for each recording; `shape` is that of one recording."""

    def build() -> Step:
        model = create("AutoModelForAudioClassification", model_type, {**sizes, "num_labels": 10})
        inputs = {"input_values": torch.randn(batch, *shape), "labels": torch.randint(0, 10, (batch,))}
        return training_step(model, inputs, optimizer)

    return build


def audio_codec(
    model_type: str, batch: int = 2, samples: int = 8000, optimizer: str = "adamw", **sizes: Any
) -> Build:
    """A waveform is encoded, quantized and decoded again."""

    def build() -> Step:
        model = create("AutoModel", model_type, sizes)
        audio = torch.randn(batch, 1, samples)
        return training_step(
            model,
            {"input_values": audio},
            optimizer,
            loss=lambda output: (output.audio_values[..., :samples] - audio).abs().mean(),
        )

    return build


WAV2VEC2_LIKE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "conv_dim": [128] * 7,
    "num_conv_pos_embeddings": 32,
}

SPEECH_CTC: dict[str, Sizes] = {
    "wav2vec2": WAV2VEC2_LIKE,
    "hubert": WAV2VEC2_LIKE,
    "wavlm": WAV2VEC2_LIKE,
    "unispeech": WAV2VEC2_LIKE,
    "unispeech-sat": {**WAV2VEC2_LIKE, "optimizer": "momentum"},
    "data2vec-audio": {**WAV2VEC2_LIKE, "num_conv_pos_embeddings": 2},
    "wav2vec2-conformer": {**WAV2VEC2_LIKE, "vocab_size": 32},
    "sew": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_conv_pos_embeddings": 32,
    },
}

SPEECH_FEATURES_CTC: dict[str, Sizes] = {
    "wav2vec2-bert": {
        "vocab_size": 32,
        "features": 160,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    },
    "parakeet_ctc": {
        "vocab_size": 32,
        "pad_token_id": 31,
        "frames": 400,
        "encoder_config": {
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "subsampling_conv_channels": 64,
        },
    },
}

SPEECH_LIKE_BART = {
    "vocab_size": 2000,
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 384,
    "decoder_ffn_dim": 384,
}

SPEECH_SEQ2SEQ: dict[str, Sizes] = {
    "whisper": {**SPEECH_LIKE_BART, "shape": (80, 400), "max_source_positions": 200},
    "speech_to_text": {**SPEECH_LIKE_BART, "shape": (400, 80), "conv_channels": 256},
    "moonshine": {
        "vocab_size": 2000,
        "hidden_size": 128,
        "intermediate_size": 384,
        "encoder_num_hidden_layers": 2,
        "decoder_num_hidden_layers": 2,
        "encoder_num_attention_heads": 4,
        "decoder_num_attention_heads": 4,
        "key": "input_values",
        "shape": (16000,),
    },
}

AUDIO_CLASSIFIERS: dict[str, Sizes] = {
    "audio-spectrogram-transformer": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_length": 128,
        "num_mel_bins": 128,
        "shape": (128, 128),
    },
}

AUDIO_CODECS: dict[str, Sizes] = {
    "encodec": {"num_filters": 16, "codebook_size": 256},
}

# ---------------------------------------------------------------------------------------- multimodal


def image_text_contrast(
    model_type: str,
    batch: int = 8,
    image_size: int = 64,
    sequence: int = 32,
    optimizer: str = "adamw",
    **sizes: Any,
) -> Build:
    """Image and text encoders trained to agree."""

    def build() -> Step:
        model = create("AutoModel", model_type, sizes)
        tokens = random_tokens(sizes["text_config"]["vocab_size"], batch, sequence)
        inputs = {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "pixel_values": torch.randn(batch, 3, image_size, image_size),
            "return_loss": True,
        }
        return training_step(model, inputs, optimizer)

    return build


def image_to_text(
    model_type: str,
    model_class: str,
    batch: int = 4,
    image_size: int = 64,
    sequence: int = 64,
    optimizer: str = "adamw",
    **sizes: Any,
) -> Build:
    """A caption for each image, read through cross-attention or a joint sequence."""

    def build() -> Step:
        model = create(model_class, model_type, sizes)
        tokens = random_tokens(2000, batch, sequence)
        inputs = {
            "input_ids": tokens,
            "labels": tokens,
            "pixel_values": torch.randn(batch, 3, image_size, image_size),
        }
        return training_step(model, inputs, optimizer)

    return build


def image_tokens_lm(
    model_type: str,
    image_token: int,
    image_tokens: int,
    batch: int = 2,
    image_size: int = 64,
    sequence: int = 96,
    several_images: bool = False,
    token_types: bool = False,
    optimizer: str = "adamw",
    **sizes: Any,
) -> Build:
    """A language model in whose text the encoded image takes the place of marked tokens."""

    def build() -> Step:
        model = create("AutoModelForImageTextToText", model_type, sizes)
        tokens = random_tokens(sizes["text_config"]["vocab_size"] - 10, batch, sequence)
        tokens[:, :image_tokens] = image_token
        labels = tokens.clone()
        labels[:, :image_tokens] = -100
        shape = (
            (batch, 1, 3, image_size, image_size) if several_images else (batch, 3, image_size, image_size)
        )
        inputs = {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "labels": labels,
            "pixel_values": torch.randn(shape),
        }
        if token_types:
            inputs["token_type_ids"] = (torch.arange(sequence) >= image_tokens).long().repeat(batch, 1)
        return training_step(model, inputs, optimizer)

    return build


def patch_grid_lm(
    model_type: str, batch: int = 2, grid: int = 8, sequence: int = 96, optimizer: str = "adamw", **sizes: Any
) -> Build:
    """A language model that receives its images as flat patches and the grid that they form."""

    def build() -> Step:
        model = create("AutoModelForImageTextToText", model_type, sizes)
        vision = model.config.vision_config
        image_tokens = (grid // vision.spatial_merge_size) ** 2
        tokens = random_tokens(1900, batch, sequence)
        tokens[:, 0] = model.config.vision_start_token_id
        tokens[:, 1 : image_tokens + 1] = model.config.image_token_id
        patch_values = 3 * vision.temporal_patch_size * vision.patch_size**2
        inputs = {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "mm_token_type_ids": (tokens == model.config.image_token_id).int(),
            "labels": tokens,
            "pixel_values": torch.randn(batch * grid * grid, patch_values),
            "image_grid_thw": torch.tensor([[1, grid, grid]] * batch),
        }
        return training_step(model, inputs, optimizer)

    return build


def visual_questions(model_type: str, batch: int = 4, optimizer: str = "adamw", **sizes: Any) -> Build:
    """Questions about images, answered from a list of answers."""

    def build() -> Step:
        model = create("AutoModelForVisualQuestionAnswering", model_type, {**sizes, "num_labels": 50})
        image_size = sizes["image_size"]
        inputs = {
            "input_ids": random_tokens(sizes["vocab_size"], batch, 32),
            "pixel_values": torch.randn(batch, 3, image_size, image_size),
            "labels": torch.rand(batch, 50),
        }
        return training_step(model, inputs, optimizer)

    return build


SMALL_TEXT = {
    "vocab_size": 2000,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    **SPECIAL_TOKENS,
}
SMALL_VISION = {**VIT_LIKE, "image_size": 64}
TWO_TOWERS = {"text_config": SMALL_TEXT, "vision_config": SMALL_VISION}
TWO_TOWERS_PROJECTED = {
    "text_config": {**SMALL_TEXT, "projection_dim": 96},
    "vision_config": {**SMALL_VISION, "projection_dim": 96},
    "projection_dim": 96,
}
SMALL_LLAMA = {
    **LLAMA_LIKE,
    "vocab_size": 2000,
    "hidden_size": 128,
    "intermediate_size": 384,
    **SPECIAL_TOKENS,
}

IMAGE_TEXT_CONTRAST: dict[str, Sizes] = {
    "clip": TWO_TOWERS_PROJECTED,
    "siglip": TWO_TOWERS,
    "blip": {
        **TWO_TOWERS_PROJECTED,
        "text_config": {**SMALL_TEXT, "encoder_hidden_size": 128, "projection_dim": 96},
    },
    "altclip": {
        **TWO_TOWERS_PROJECTED,
        "text_config": {**SMALL_TEXT, "project_dim": 96},
    },
    "chinese_clip": TWO_TOWERS_PROJECTED,
    "align": {
        "text_config": SMALL_TEXT,
        "vision_config": {
            "image_size": 64,
            "width_coefficient": 0.5,
            "depth_coefficient": 0.5,
        },
        "projection_dim": 160,
    },
}

IMAGE_TO_TEXT: dict[str, Sizes] = {
    "git": {**SMALL_TEXT, "vision_config": SMALL_VISION, "model_class": "GitForCausalLM"},
}

IMAGE_TOKENS_LM: dict[str, Sizes] = {
    "llava": {
        "text_config": {**SMALL_LLAMA, "model_type": "llama"},
        "vision_config": {**SMALL_VISION, "model_type": "clip_vision_model"},
        "image_token_index": 1999,
        "image_token": 1999,
        "image_tokens": 64,
    },
    "paligemma": {
        "text_config": {**SMALL_LLAMA, "model_type": "gemma", "head_dim": 32},
        "vision_config": {**SMALL_VISION, "model_type": "siglip_vision_model", "projection_dim": 128},
        "projection_dim": 128,
        "image_token_index": 1999,
        "image_token": 1999,
        "image_tokens": 64,
        "token_types": True,
    },
    "idefics3": {
        "text_config": {**SMALL_LLAMA, "model_type": "llama"},
        "vision_config": SMALL_VISION,
        "image_token_id": 1999,
        "image_token": 1999,
        "image_tokens": 16,
        "several_images": True,
    },
    "gemma3": {
        "text_config": {**SMALL_LLAMA, "head_dim": 32, "sliding_window": 64},
        "vision_config": {**SMALL_VISION, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 16,
        "image_token_index": 1999,
        "image_token": 1999,
        "image_tokens": 16,
        "token_types": True,
    },
}

PATCH_GRID_LM: dict[str, Sizes] = {
    "qwen2_vl": {
        "text_config": {
            **SMALL_LLAMA,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        },
        "vision_config": {
            "depth": 2,
            "embed_dim": 128,
            "hidden_size": 128,
            "num_heads": 4,
            "patch_size": 8,
        },
        "image_token_id": 1999,
        "video_token_id": 1998,
        "vision_start_token_id": 1997,
        "vision_end_token_id": 1996,
    },
}

VISUAL_QUESTIONS: dict[str, Sizes] = {
    "vilt": {**BERT_LIKE, "image_size": 96, "patch_size": 16},
}

# --------------------------------------------------------------------------------------- time series


def forecast(
    model_type: str, model_class: str, batch: int = 64, optimizer: str = "adamw", **sizes: Any
) -> Build:
    """A series continued from its past, with the known values of the future as targets."""

    def build() -> Step:
        model = create(model_class, model_type, sizes)
        past = sizes["context_length"] + max(model.config.lags_sequence)
        inputs = {
            "past_values": torch.randn(batch, past),
            "past_time_features": torch.randn(batch, past, 2),
            "past_observed_mask": torch.ones(batch, past),
            "future_values": torch.randn(batch, sizes["prediction_length"]),
            "future_time_features": torch.randn(batch, sizes["prediction_length"], 2),
        }
        return training_step(model, inputs, optimizer)

    return build


def masked_series(model_type: str, batch: int = 16, optimizer: str = "adamw", **sizes: Any) -> Build:
    """Reconstruction of the hidden patches of several series."""

    def build() -> Step:
        model = create("PatchTSTForPretraining", model_type, sizes)
        series = torch.randn(batch, sizes["context_length"], sizes["num_input_channels"])
        return training_step(model, {"past_values": series}, optimizer)

    return build


FORECASTERS: dict[str, Sizes] = {
    "time_series_transformer": {
        "model_class": "TimeSeriesTransformerForPrediction",
        "context_length": 64,
        "prediction_length": 32,
        "num_time_features": 2,
        "d_model": 64,
    },
    "autoformer": {
        "model_class": "AutoformerForPrediction",
        "context_length": 64,
        "prediction_length": 32,
        "num_time_features": 2,
        "d_model": 64,
    },
}

MASKED_SERIES: dict[str, Sizes] = {
    "patchtst": {
        "context_length": 128,
        "patch_length": 4,
        "patch_stride": 4,
        "num_input_channels": 4,
        "d_model": 64,
        "ffn_dim": 256,
        "do_mask_input": True,
    },
}

CASES = [
    *cases_of("vision transformer", image_classifier, VISION_TRANSFORMERS, convolutions=True),
    *cases_of("vision transformer", image_features, {"dinov3_vit": VIT_LIKE}, convolutions=True),
    *cases_of(
        "vision transformer",
        image_features,
        {
            "clip_vision_model": {**VIT_LIKE, "model_class": "CLIPVisionModel"},
            "siglip_vision_model": {**VIT_LIKE, "model_class": "SiglipVisionModel"},
        },
        convolutions=True,
    ),
    *cases_of(
        "vision transformer",
        masked_image,
        {
            "vit_mae": {
                **VIT_LIKE,
                "decoder_hidden_size": 96,
                "decoder_intermediate_size": 256,
                "decoder_num_hidden_layers": 2,
                "decoder_num_attention_heads": 4,
            }
        },
        convolutions=True,
    ),
    *cases_of(
        "vision transformer", segmentation, {"segformer": {"decoder_hidden_size": 64}}, convolutions=True
    ),
    *cases_of("vision transformer", depth_estimation, {"glpn": {}}, convolutions=True),
    *cases_of(
        "vision transformer",
        super_resolution,
        {"swin2sr": {"embed_dim": 48, "depths": [2, 2], "num_heads": [4, 4]}},
        convolutions=True,
    ),
    *cases_of(
        "detection",
        detection,
        {
            "yolos": {**VIT_LIKE, "num_detection_tokens": 20},
            "detr": {
                "backbone_config": {
                    "model_type": "resnet",
                    "hidden_sizes": [32, 64, 128, 128],
                    "depths": [1, 1, 1, 1],
                    "embedding_size": 32,
                    "out_features": ["stage4"],
                },
                "d_model": 192,
                "encoder_layers": 2,
                "decoder_layers": 2,
                "encoder_ffn_dim": 512,
                "decoder_ffn_dim": 512,
                "num_queries": 50,
                "batch": 4,
                "image_size": 192,
            },
        },
        convolutions=True,
    ),
    *cases_of("video", video_classifier, VIDEO_TRANSFORMERS, convolutions=True),
    *cases_of("convolutional", image_classifier, CONVOLUTIONAL, convolutions=True),
    *cases_of("audio", speech_ctc, SPEECH_CTC, convolutions=True, data_dependent=True),
    *cases_of("audio", speech_features_ctc, SPEECH_FEATURES_CTC, convolutions=True, data_dependent=True),
    *cases_of("audio", speech_seq2seq, SPEECH_SEQ2SEQ, convolutions=True),
    *cases_of("audio", audio_classifier, AUDIO_CLASSIFIERS, convolutions=True),
    *cases_of("audio", audio_codec, AUDIO_CODECS, convolutions=True),
    *cases_of("multimodal", image_text_contrast, IMAGE_TEXT_CONTRAST, convolutions=True),
    *cases_of("multimodal", image_to_text, IMAGE_TO_TEXT, convolutions=True),
    *cases_of("multimodal", image_tokens_lm, IMAGE_TOKENS_LM, convolutions=True),
    *cases_of("multimodal", patch_grid_lm, PATCH_GRID_LM, convolutions=True),
    *cases_of("multimodal", visual_questions, VISUAL_QUESTIONS, convolutions=True),
    *cases_of("time series", forecast, FORECASTERS, data_dependent=True),
    *cases_of("time series", masked_series, MASKED_SERIES),
]
