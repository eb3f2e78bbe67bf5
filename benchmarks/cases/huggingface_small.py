"""Hugging Face architectures in the sizes of transformers' own tests, where small things weigh most.

Speech classifiers with an attention mask (their frames are set to zero through a view), a text classifier
whose mask says which tokens attend to all, and a mixture of experts that sees.
"""

from __future__ import annotations

from typing import Any

import torch

from trainfit import Step

from . import Case
from .huggingface import Build, Sizes, create, random_tokens, training_step

BATCH = 13


def speech_classifier(model_type: str, key: str, shape: tuple[int, ...], **sizes: Any) -> Build:
    """One label for each recording of a batch, with the mask of its frames."""

    def build() -> Step:
        model = create("AutoModelForAudioClassification", model_type, sizes)
        recordings = torch.rand(BATCH, *shape)
        mask = torch.ones(recordings.shape[:2], dtype=torch.long)
        labels = torch.randint(0, 2, (BATCH,))
        return training_step(model, {key: recordings, "attention_mask": mask, "labels": labels}, "sgd")

    return build


def longformer_classifier() -> Step:
    """A text of which the first token attends to all others."""
    sizes = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = create("AutoModelForSequenceClassification", "longformer", sizes)
    tokens = random_tokens(300, 4, 48)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return training_step(model, {**inputs, "labels": torch.randint(0, 2, (4,))}, "sgd")


def ernie_that_sees(batch: int = 2, grid: int = 4, sequence: int = 64) -> Step:
    """Experts for text and for images; the offsets of the images are written part by part."""
    start, end, image = 3, 4, 5
    sizes = {
        "text_config": {
            "vocab_size": 99,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "mlp_layer_types": ["dense", "sparse"],
            "moe_intermediate_size": [24, 24],
            "moe_k": 2,
            "moe_num_experts": 8,
            "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [1, 1, 2]},
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 22,
            "num_heads": 2,
            "spatial_merge_size": 1,
            "patch_size": 14,
        },
        "image_start_token_id": start,
        "image_end_token_id": end,
        "image_token_id": image,
        "video_start_token_id": 6,
        "video_end_token_id": 7,
        "video_token_id": 8,
    }
    model = create("Ernie4_5_VLMoeForConditionalGeneration", "ernie4_5_vl_moe", sizes)
    tokens = random_tokens(99, batch, sequence)
    patches = grid * grid
    tokens[:, 0], tokens[:, 1 : 1 + patches], tokens[:, 1 + patches] = start, image, end
    inputs = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens,
        "mm_token_type_ids": (tokens == image).int(),
        "pixel_values": torch.randn(batch * patches, 3 * 14 * 14),
        "image_grid_thw": torch.tensor([[1, grid, grid]] * batch),
    }
    return training_step(model, inputs, "sgd")


SPEECH_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "conv_dim": (32, 32, 32),
    "conv_stride": (4, 4, 4),
    "conv_kernel": (8, 8, 8),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
SQUEEZED = {
    **SPEECH_SIZES,
    "hidden_size": 32,
    "conv_dim": (64, 32, 32),
    "conv_stride": (5, 2, 1),
    "conv_kernel": (10, 3, 1),
    "num_conv_pos_embeddings": 31,
    "squeeze_factor": 2,
}
SPEECH_CLASSIFIERS: dict[str, Sizes] = {
    "wav2vec2": SPEECH_SIZES,
    "unispeech": SPEECH_SIZES,
    "unispeech-sat": SPEECH_SIZES,
    "sew": SQUEEZED,
    "sew-d": {**SQUEEZED, "max_position_embeddings": 512, "position_buckets": 256},
}
FEATURES_CLASSIFIER = {
    "hidden_size": 16,
    "feature_projection_input_dim": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "conv_depthwise_kernel_size": 7,
}


def _case(name: str, build: Build, kind: str, data_dependent: bool = False) -> Case:
    return Case(f"hf-small-{name}", "huggingface", build, True, data_dependent, kind)


CASES = [
    *(
        _case(name, speech_classifier(name, "input_values", (1024,), **sizes), "audio", data_dependent=True)
        for name, sizes in SPEECH_CLASSIFIERS.items()
    ),
    _case(
        "wav2vec2-bert",
        speech_classifier("wav2vec2-bert", "input_features", (100, 16), **FEATURES_CLASSIFIER),
        "audio",
        data_dependent=True,
    ),
    _case("longformer", longformer_classifier, "encoder"),
    _case("ernie4-5-vl-moe", ernie_that_sees, "multimodal"),
]
