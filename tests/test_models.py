"""The built-in models: published parameter counts, the loss an untrained model must have, and structure."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from trainfit.models.catalog import PRESETS, Preset, make_model, names_by_family
from trainfit.models.llama import LlamaConfig, Rotation
from trainfit.models.losses import IGNORED_LABEL, class_loss, next_token_loss
from trainfit.models.mixtral import MixtralConfig, MixtureOfExperts
from trainfit.models.resnet import ResNetConfig

TINY = [preset for preset in PRESETS.values() if preset.name.endswith("-tiny")]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Models this small lose more to waking threads than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def on_meta(preset: Preset) -> nn.Module:
    with torch.device("meta"):
        return make_model(preset.config)


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def example(preset: Preset) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Two small inputs of the preset with labels, and the number of classes they are drawn from."""
    if preset.image_size is not None:
        classes = preset.config.classes
        return torch.randn(8, 3, 64, 64), torch.randint(0, classes, (8,)), classes
    vocab_size = preset.config.vocab_size
    tokens = torch.randint(0, vocab_size, (2, 32))
    return tokens, tokens, vocab_size


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_parameter_count_is_the_published_one(preset: Preset) -> None:
    assert parameter_count(on_meta(preset)) == preset.parameter_count


@pytest.mark.parametrize(
    ("name", "model_type", "auto_class", "changes"),
    [
        ("gpt2-xl", "gpt2", "AutoModelForCausalLM", {"n_layer": 48, "n_head": 25, "n_embd": 1600}),
        (
            "llama-3-8b",
            "llama",
            "AutoModelForCausalLM",
            {"vocab_size": 128256, "num_key_value_heads": 8, "intermediate_size": 14336},
        ),
        ("mixtral-8x7b", "mixtral", "AutoModelForCausalLM", {}),
        ("bert-base", "bert", "AutoModelForMaskedLM", {}),
        ("vit-b-16", "vit", "AutoModelForImageClassification", {"num_labels": 1000}),
        ("resnet-50", "resnet", "AutoModelForImageClassification", {"num_labels": 1000}),
    ],
)
def test_parameter_count_agrees_with_transformers(
    name: str, model_type: str, auto_class: str, changes: dict[str, int]
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(model_type, **changes)
    with torch.device("meta"):
        theirs = getattr(transformers, auto_class).from_config(config)
    assert parameter_count(on_meta(PRESETS[name])) == parameter_count(theirs)


def test_every_family_has_a_tiny_preset() -> None:
    assert {preset.family for preset in TINY} == set(names_by_family())


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_preset_is_either_language_or_vision(preset: Preset) -> None:
    assert (preset.seq is None) != (preset.image_size is None)


@pytest.mark.parametrize("preset", TINY, ids=lambda preset: preset.name)
def test_untrained_loss_is_that_of_guessing(preset: Preset) -> None:
    torch.manual_seed(0)
    model = make_model(preset.config)
    inputs, labels, classes = example(preset)
    assert model(inputs, labels).item() == pytest.approx(math.log(classes), rel=0.05)


@pytest.mark.parametrize("preset", TINY, ids=lambda preset: preset.name)
def test_every_parameter_gets_a_gradient(preset: Preset) -> None:
    torch.manual_seed(0)
    model = make_model(preset.config)
    inputs, labels, _ = example(preset)
    model(inputs, labels).backward()
    # An expert that no token chose has a gradient of zeros, all others a real one.
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert without == []


@pytest.mark.parametrize("preset", TINY, ids=lambda preset: preset.name)
def test_without_labels_logits_are_returned(preset: Preset) -> None:
    model = make_model(preset.config)
    inputs, _, classes = example(preset)
    logits = model(inputs)
    assert logits.shape == ((*inputs.shape, classes) if preset.seq else (len(inputs), classes))


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny", "mixtral-tiny"])
def test_causal_model_does_not_see_the_future(name: str) -> None:
    torch.manual_seed(0)
    model = make_model(PRESETS[name].config).eval()
    tokens = torch.randint(0, 4096, (1, 16))
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 4096
    torch.testing.assert_close(model(tokens)[:, :-1], model(changed)[:, :-1])


def test_bert_sees_both_ways() -> None:
    model = make_model(PRESETS["bert-tiny"].config).eval()
    tokens = torch.zeros(1, 16, dtype=torch.long)
    changed = tokens.clone()
    changed[0, -1] = 1
    assert not torch.equal(model(tokens)[:, 0], model(changed)[:, 0])


def test_next_token_loss_equals_shifted_logits() -> None:
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    shifted = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 7), labels[:, 1:].reshape(-1))
    torch.testing.assert_close(next_token_loss(logits, labels), shifted)


def test_ignored_labels_do_not_count() -> None:
    logits, labels = torch.randn(1, 4, 7), torch.tensor([[3, IGNORED_LABEL, IGNORED_LABEL, 5]])
    expected = nn.functional.cross_entropy(logits[0, [0, 3]], torch.tensor([3, 5]))
    torch.testing.assert_close(class_loss(logits, labels), expected)


def test_rotation_keeps_scores_that_depend_on_distance_only() -> None:
    rotation = Rotation.of_positions(torch.arange(8), 16, 10000.0, like=torch.zeros(1))
    query = rotation.apply(torch.randn(16).expand(1, 1, 8, 16))
    key = rotation.apply(torch.randn(16).expand(1, 1, 8, 16))
    scores = (query @ key.transpose(-1, -2))[0, 0]
    for distance in range(-7, 8):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4, rtol=1e-4)


def test_rotation_agrees_with_complex_multiplication() -> None:
    vectors = torch.randn(1, 1, 8, 16)
    pairs = torch.complex(vectors[..., :8], vectors[..., 8:])
    angles = torch.arange(8.0)[:, None] * 10000.0 ** (-torch.arange(8.0) / 8)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    rotation = Rotation.of_positions(torch.arange(8), 16, 10000.0, like=vectors)
    torch.testing.assert_close(rotation.apply(vectors), expected)


def test_mixture_equals_running_every_expert_on_every_token() -> None:
    torch.manual_seed(0)
    config = MixtralConfig(layers=1, heads=2, kv_heads=1, hidden=16, feed_forward=32)
    mixture = MixtureOfExperts(config)
    hidden = torch.randn(2, 5, 16)
    scores, chosen = mixture.router(hidden).topk(2, dim=-1)
    weights = torch.zeros(2, 5, 8).scatter(-1, chosen, scores.softmax(dim=-1))
    answers = torch.stack([expert(hidden) for expert in mixture.experts], dim=-1)
    torch.testing.assert_close(mixture(hidden), (answers * weights[..., None, :]).sum(dim=-1))


def test_grouped_queries_equal_repeated_keys() -> None:
    torch.manual_seed(0)
    grouped = make_model(LlamaConfig(64, layers=1, heads=4, kv_heads=2, hidden=32, feed_forward=64))
    full = make_model(LlamaConfig(64, layers=1, heads=4, kv_heads=4, hidden=32, feed_forward=64))
    weights = grouped.state_dict()
    for name in ("key", "value"):
        entry = f"blocks.0.attention.{name}.weight"
        weights[entry] = weights[entry].view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32)
    full.load_state_dict(weights)
    tokens = torch.randint(0, 64, (2, 8))
    torch.testing.assert_close(grouped(tokens), full(tokens))


def test_bottleneck_shrinks_the_image_in_its_3x3() -> None:
    model = make_model(ResNetConfig(blocks_per_stage=(1, 1), width=8, classes=10))
    strides = [layer.stride[0] for layer in model.stages[1][0].convolutions]
    sizes = [layer.kernel_size[0] for layer in model.stages[1][0].convolutions]
    assert (sizes, strides) == ([1, 3, 1], [1, 2, 1])
