"""The options about torch.compile: whether a step is compiled, by which backend, in which mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from trainfit.cli.completions import one_of
from trainfit.cli.plain_option import option
from trainfit.errors import OptionError


@dataclass(frozen=True)
class CompileFlags:
    """How a step is compiled."""

    panel: ClassVar[str] = "torch.compile"
    compile: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="The step as torch.compile runs it: what the step compiles itself, else its whole model.",
        ),
    ] = False
    compile_mode: Annotated[
        str | None,
        option(
            "MODE",
            "With --compile: default, or reduce-overhead (CUDA graphs: kernels are launched all at once).",
            offered=one_of("default", "reduce-overhead"),
        ),
    ] = None
    compile_backend: Annotated[
        str | None,
        option(
            "NAME",
            "With --compile: inductor (default), or aot_eager, which runs the graphs node by node.",
            offered=one_of("inductor", "aot_eager"),
        ),
    ] = None

    def asked(self) -> bool:
        """Whether the step is compiled; the other options make no sense without that."""
        if not self.compile:
            refuse_without_compile(compile_mode=self.compile_mode, compile_backend=self.compile_backend)
        return self.compile

    def arguments(self) -> dict[str, Any]:
        """Return them as `api.compiled_steps` takes them."""
        return {"mode": self.compile_mode or "default", "backend": self.compile_backend or "inductor"}


def refuse_with_compile(**others: Any) -> None:
    """Refuse options that have no meaning for a compiled step."""
    for name, value in others.items():
        if value:
            raise OptionError(f"--{name.replace('_', '-')} is not for a step with --compile; leave it out.")


def refuse_without_compile(**others: Any) -> None:
    """Refuse options that only a compiled step has."""
    for name, value in others.items():
        if value:
            raise OptionError(f"--{name.replace('_', '-')} belongs to --compile; add it.")
