"""The built-in models at small size, with each dtype and optimizer that the command line offers."""

from __future__ import annotations

from cases import Case
from trainfit import Step, StepOptions
from trainfit.targets import load


def _case(
    preset: str, *, convolutions: bool = False, data_dependent: bool = False, **options: object
) -> Case:
    given = "-".join(str(value) for value in options.values() if isinstance(value, str))
    chosen = StepOptions(**options)  # type: ignore[arg-type]

    def build() -> Step:
        return load(preset, chosen).build()

    name = f"builtin-{preset}-{given}" if given else f"builtin-{preset}"
    return Case(name, "builtin", build, convolutions, data_dependent, preset.split("-")[0])


CASES = [
    _case("gpt2-tiny", batch=4, seq=256),
    _case("gpt2-tiny", batch=4, seq=256, dtype="bf16"),
    _case("gpt2-tiny", batch=4, seq=256, dtype="bf16-autocast"),
    _case("gpt2-tiny", batch=4, seq=256, optimizer="adamw-foreach"),
    _case("gpt2-tiny", batch=4, seq=256, optimizer="adamw-fused"),
    _case("gpt2-tiny", batch=4, seq=256, optimizer="adamw-for-loop"),
    _case("gpt2-tiny", batch=4, seq=256, optimizer="sgd"),
    _case("gpt2-tiny", batch=4, seq=256, optimizer="none"),
    _case("llama-tiny", batch=4, seq=256),
    _case("llama-tiny", batch=4, seq=256, dtype="bf16"),
    _case("mixtral-tiny", batch=4, seq=256, data_dependent=True),
    _case("bert-tiny", batch=8, seq=128),
    _case("vit-tiny", batch=16, convolutions=True),
    _case("vit-tiny", batch=16, dtype="fp16-autocast", convolutions=True),
    _case("resnet-tiny", batch=16, convolutions=True),
    _case("resnet-18", batch=4, convolutions=True),
]
