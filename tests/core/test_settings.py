"""Settings in the words that people use, and what two steps differ in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainfit.traces.settings import (
    Difference,
    Settings,
    describe,
    differences,
    dtype_name,
    is_sound,
    named,
    settings_json,
)

GPT2 = Settings(
    batch=8,
    seq=1024,
    dtype="bf16",
    optimizer="adamw",
    optimizer_class="AdamW",
    optimizer_kernels="foreach",
    parameters=124_439_808,
    trainable_parameters=124_439_808,
    modules=150,
    model_class="GPT2",
    model=named({"layers": 12, "dropout": 0.1}),
)


def test_one_line_says_what_the_step_is() -> None:
    assert describe(GPT2) == (
        "batch 8, sequence 1024, bf16 parameters, AdamW (foreach), 124.4 M parameters, layers=12, dropout=0.1"
    )


def test_what_is_not_known_is_not_said() -> None:
    assert describe(Settings()) == ""
    assert describe(Settings(optimizer="none", dtype="bf16-autocast")) == (
        "fp32 parameters with bf16 autocast, no optimizer"
    )


def test_frozen_parameters_and_many_arguments_are_said_shortly() -> None:
    lora = replace(
        GPT2, trainable_parameters=1_000, model=(), arguments=named({f"a{n}": n for n in range(20)})
    )
    line = describe(lora)
    assert "124.4 M parameters, 1,000 of them trained" in line
    assert line.endswith("a7=7, 12 more")


@pytest.mark.parametrize(
    ("stored", "autocast", "name"),
    [
        ([], [], None),
        (["float32"], [], "fp32"),
        (["bfloat16"], [], "bf16"),
        (["float32"], ["bfloat16"], "bf16-autocast"),
        (["float32"], ["float16"], "fp16-autocast"),
        (["bfloat16", "float32"], [], "bf16+fp32"),
        (["bfloat16"], ["float16"], "bf16/fp16-autocast"),
        (["int8"], [], "int8"),
    ],
)
def test_dtypes_have_the_names_of_the_option(stored: list[str], autocast: list[str], name: str) -> None:
    assert dtype_name(stored, autocast) == name


def test_values_come_back_as_json() -> None:
    class Odd:
        pass

    values = named(
        {"n": 4, "x": 0.1, "flag": True, "none": None, "list": [1, 2], "odd": Odd(), "nan": float("nan")}
    )
    settings = replace(GPT2, arguments=values)
    assert is_sound(settings)
    found = settings_json(settings)["arguments"]
    assert found["odd"] == "Odd"  # no address, which would be another one each time
    assert found == {"n": 4, "x": 0.1, "flag": True, "none": None, "list": [1, 2], "odd": "Odd", "nan": "nan"}


def test_what_two_steps_differ_in() -> None:
    assert differences(GPT2, GPT2) == ()
    other = replace(GPT2, batch=4, optimizer_kernels="fused", model=named({"layers": 6, "dropout": 0.1}))
    assert differences(GPT2, other) == (
        Difference("batch", 8, 4),
        Difference("optimizer", "AdamW (foreach)", "AdamW (fused)"),
        Difference("layers", "12", "6"),
    )
