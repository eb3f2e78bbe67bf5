"""The built-in presets by their command-line name: shape, published parameter count, usual step size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from trainfit.models.bert import Bert, BertConfig
from trainfit.models.gpt2 import GPT2, GPT2Config
from trainfit.models.llama import Llama, LlamaConfig
from trainfit.models.mixtral import Mixtral, MixtralConfig
from trainfit.models.recipe import Dtype
from trainfit.models.resnet import ResNet, ResNetConfig
from trainfit.models.vit import ViT, ViTConfig

Family = Literal["gpt2", "llama", "mixtral", "vit", "resnet", "bert"]
Config = GPT2Config | LlamaConfig | MixtralConfig | BertConfig | ViTConfig | ResNetConfig


@dataclass(frozen=True)
class Preset:
    """One built-in model. `seq` is set for language models, `image_size` for vision models.

    `dtype` is what the step computes in when the user does not say: bfloat16 for the models whose weights
    were published in 16 bits, float32 for the older ones. Tied weights count once in `parameter_count`.
    """

    name: str
    description: str
    family: Family
    config: Config
    parameter_count: int
    batch: int
    seq: int | None = None
    image_size: int | None = None
    dtype: Dtype = "fp32"


def make_model(config: Config) -> nn.Module:
    """Build the model of this shape, with fresh weights, in torch's default dtype and device."""
    model: nn.Module = _MODELS[type(config)](config)
    return model


_MODELS: dict[type[Config], Any] = {
    GPT2Config: GPT2,
    LlamaConfig: Llama,
    MixtralConfig: Mixtral,
    BertConfig: Bert,
    ViTConfig: ViT,
    ResNetConfig: ResNet,
}


def _gpt2(name: str, description: str, config: GPT2Config, parameter_count: int, batch: int = 8) -> Preset:
    return Preset(name, description, "gpt2", config, parameter_count, batch, seq=config.context)


def _llama(name: str, description: str, config: LlamaConfig, parameter_count: int, seq: int) -> Preset:
    return Preset(name, description, "llama", config, parameter_count, batch=1, seq=seq, dtype="bf16")


def _bert(name: str, description: str, config: BertConfig, parameter_count: int, batch: int = 16) -> Preset:
    return Preset(name, description, "bert", config, parameter_count, batch, seq=config.context)


def _vit(name: str, description: str, config: ViTConfig, parameter_count: int, batch: int = 64) -> Preset:
    return Preset(name, description, "vit", config, parameter_count, batch, image_size=config.image_size)


def _resnet(name: str, description: str, config: ResNetConfig, parameter_count: int) -> Preset:
    return Preset(name, description, "resnet", config, parameter_count, batch=64, image_size=224)


# Counts of OpenAI's checkpoints as loaded by transformers' GPT2LMHeadModel (head tied to the embedding).
_GPT2_PRESETS = (
    _gpt2(
        "gpt2-tiny",
        "GPT-2 with 4 small layers, for tests and demos",
        GPT2Config(vocab_size=4096, context=256, layers=4, heads=4, hidden=128, dropout=0.0),
        1_350_400,
    ),
    _gpt2("gpt2", "GPT-2 124M", GPT2Config(), 124_439_808),
    _gpt2("gpt2-medium", "GPT-2 355M", GPT2Config(layers=24, heads=16, hidden=1024), 354_823_168),
    _gpt2("gpt2-large", "GPT-2 774M", GPT2Config(layers=36, heads=20, hidden=1280), 774_030_080, batch=4),
    _gpt2("gpt2-xl", "GPT-2 1.5B", GPT2Config(layers=48, heads=25, hidden=1600), 1_557_611_200, batch=4),
)

_LLAMA_3 = LlamaConfig(vocab_size=128256, kv_heads=8, feed_forward=14336, rope_theta=5e5)

# Counts of the published checkpoints (Hugging Face model cards: TinyLlama/TinyLlama-1.1B, and meta-llama/
# Llama-2-7b-hf, Meta-Llama-3-8B, Meta-Llama-3-70B, Llama-3.1-405B).
_LLAMA_PRESETS = (
    Preset(
        "llama-tiny",
        "Llama with 4 small layers and 2 key-value heads, for tests and demos",
        "llama",
        LlamaConfig(vocab_size=4096, layers=4, heads=4, kv_heads=2, hidden=128, feed_forward=352),
        parameter_count=1_787_008,
        batch=8,
        seq=256,
    ),
    _llama(
        "tinyllama-1.1b",
        "TinyLlama 1.1B",
        LlamaConfig(layers=22, kv_heads=4, hidden=2048, feed_forward=5632),
        1_100_048_384,
        seq=2048,
    ),
    _llama("llama-2-7b", "Llama 2 7B", LlamaConfig(), 6_738_415_616, seq=4096),
    _llama("llama-3-8b", "Llama 3 8B", _LLAMA_3, 8_030_261_248, seq=8192),
    _llama(
        "llama-3-70b",
        "Llama 3 70B",
        replace(_LLAMA_3, layers=80, heads=64, hidden=8192, feed_forward=28672),
        70_553_706_496,
        seq=8192,
    ),
    _llama(
        "llama-3-405b",
        "Llama 3.1 405B",
        replace(_LLAMA_3, layers=126, heads=128, hidden=16384, feed_forward=53248),
        405_853_388_800,
        seq=8192,
    ),
)

# Count of mistralai/Mixtral-8x7B-v0.1.
_MIXTRAL_PRESETS = (
    Preset(
        "mixtral-tiny",
        "Mixtral with 2 small layers of 8 experts, for tests and demos",
        "mixtral",
        MixtralConfig(vocab_size=4096, layers=2, heads=4, kv_heads=2, hidden=128, feed_forward=256),
        parameter_count=2_722_432,
        batch=4,
        seq=128,
    ),
    Preset(
        "mixtral-8x7b",
        "Mixtral 8x7B, 2 of 8 experts per token",
        "mixtral",
        MixtralConfig(),
        parameter_count=46_702_792_704,
        batch=1,
        seq=4096,
        dtype="bf16",
    ),
)

# Counts that torchvision documents for its vit_b_16, vit_l_16, resnet18 and resnet50 weights.
_VISION_PRESETS = (
    _vit(
        "vit-tiny",
        "ViT with 4 small layers on 64 x 64 images, for tests and demos",
        ViTConfig(image_size=64, patch_size=8, classes=100, layers=4, heads=4, hidden=128),
        839_396,
        batch=8,
    ),
    _vit("vit-b-16", "ViT-B/16", ViTConfig(), 86_567_656),
    _vit("vit-l-16", "ViT-L/16", ViTConfig(layers=24, heads=16, hidden=1024), 304_326_632),
    Preset(
        "resnet-tiny",
        "ResNet with one narrow bottleneck per stage on 64 x 64 images, for tests and demos",
        "resnet",
        ResNetConfig(blocks_per_stage=(1, 1, 1, 1), width=16, classes=100),
        parameter_count=557_684,
        batch=8,
        image_size=64,
    ),
    _resnet(
        "resnet-18",
        "ResNet-18",
        ResNetConfig(block="basic", blocks_per_stage=(2, 2, 2, 2)),
        11_689_512,
    ),
    _resnet("resnet-50", "ResNet-50 v1.5", ResNetConfig(), 25_557_032),
)

# Counts of transformers' BertForMaskedLM for bert-base-uncased and bert-large-uncased (decoder tied).
_BERT_PRESETS = (
    _bert(
        "bert-tiny",
        "BERT with 4 small layers, for tests and demos",
        BertConfig(vocab_size=4096, context=128, layers=4, heads=4, hidden=128),
        1_355_136,
        batch=8,
    ),
    _bert("bert-base", "BERT-base uncased with its masked-token head", BertConfig(), 109_514_298),
    _bert(
        "bert-large",
        "BERT-large uncased with its masked-token head",
        BertConfig(layers=24, heads=16, hidden=1024),
        335_174_458,
    ),
)

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (*_GPT2_PRESETS, *_LLAMA_PRESETS, *_MIXTRAL_PRESETS, *_VISION_PRESETS, *_BERT_PRESETS)
}


def names_by_family() -> dict[str, tuple[str, ...]]:
    """Preset names grouped by family, in the order of the table."""
    families = dict.fromkeys(preset.family for preset in PRESETS.values())
    return {
        family: tuple(preset.name for preset in PRESETS.values() if preset.family == family)
        for family in families
    }
