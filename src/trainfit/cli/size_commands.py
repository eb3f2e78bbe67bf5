"""`max-batch` and `max-seq`, and what `estimate` and `plan` do with lists of batches and devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from trainfit.cli import cli_options as given
from trainfit.cli.cli_running import command, present, working
from trainfit.cli.list_options import ListedRequestFlags, hidden, refuse_with_lists
from trainfit.cli.plain_option import option
from trainfit.cli.solver_options import SolverFlags

if TYPE_CHECKING:
    from trainfit.cli.output_options import OutputFlags
    from trainfit.sizing.size_results import SizeName


@dataclass(frozen=True)
class StepWithoutBatch(given.StepFlags):
    """What can be asked of a step whose batch is looked for."""

    batch: Annotated[int | None, hidden("batch")] = None


@dataclass(frozen=True)
class StepWithoutSeq(given.StepFlags):
    """What can be asked of a step whose sequence is looked for."""

    seq: Annotated[int | None, hidden("seq")] = None


@dataclass(frozen=True)
class BatchRequestFlags(given.RequestFlags):
    """A step of any batch on a device."""

    step: StepWithoutBatch = StepWithoutBatch()


@dataclass(frozen=True)
class SeqRequestFlags(given.RequestFlags):
    """A step of any sequence on a device."""

    step: StepWithoutSeq = StepWithoutSeq()


@dataclass(frozen=True)
class SizeFlags:
    """Which sizes count."""

    panel: ClassVar[str] = "The size"
    with_plan: Annotated[
        bool,
        typer.Option("--with-plan", help="Look for the largest size that a plan makes fit."),
    ] = False
    budget: given.Budget = None
    multiple_of: Annotated[int, option("N", "Look only at multiples of N.")] = 1
    seconds: Annotated[float, option("N", "With --with-plan: stop solving for a size after this long.")] = (
        30.0
    )

    def arguments(self) -> dict[str, Any]:
        """Return them as `api.size_judge.SizeQuestion` takes them."""
        return {
            "with_plan": self.with_plan,
            "budget": self.budget,
            "multiple_of": self.multiple_of,
            "seconds_limit": self.seconds,
        }


def max_batch(
    target: given.Target, *, size: SizeFlags, asked: BatchRequestFlags, outputs: given.OutputFlags
) -> None:
    """Find the largest batch that fits, and the throughput of smaller ones.

    Few batches are captured and the others worked out; the largest that fits
    is captured, and so is the next, which does not fit. Exit code 3 if not even
    one sample fits.

    [bold]Examples[/bold]

      trainfit max-batch gpt2 --device a100-40gb
      trainfit max-batch gpt2 --seq 512 --device rtx-4090 --with-plan
      trainfit max-batch train.py:build --device h100 --multiple-of 8

    A function of your own gets the size as its parameter batch.
    """
    _present_largest("batch", target, size, asked, outputs)


def max_seq(
    target: given.Target, *, size: SizeFlags, asked: SeqRequestFlags, outputs: given.OutputFlags
) -> None:
    """Find the longest sequence that fits, and the throughput of shorter ones.

    As max-batch does; a model that has positions for so many tokens and no
    more is said to be the limit.

    [bold]Examples[/bold]

      trainfit max-seq llama-3-8b --device h100 --with-plan
      trainfit max-seq gpt2 --batch 8 --device a100-40gb --multiple-of 64
    """
    _present_largest("seq", target, size, asked, outputs)


def _present_largest(
    name: SizeName, target: str, size: SizeFlags, asked: given.RequestFlags, outputs: OutputFlags
) -> None:
    with working(outputs):
        from trainfit.api.size_judge import SizeQuestion
        from trainfit.api.sizes import largest_size
        from trainfit.report.sizes_data import size_data
        from trainfit.report.text_sizes import size_view

        result = largest_size(asked.request(target), SizeQuestion(name, **size.arguments()))
    present(outputs, size_data(result), size_view, result)


def register_size_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for function in (max_batch, max_seq):
        command(app)(function)


def several_estimates(
    target: str, asked: ListedRequestFlags, outputs: OutputFlags, save_trace: str | None
) -> None:
    """Show an estimate of each step in one table."""
    refuse_with_lists(outputs, save_trace=save_trace)
    with working(outputs):
        from trainfit.api.several import estimate_asked, one_by_one
        from trainfit.report.sizes_data import several_steps
        from trainfit.report.text_sizes import several_view

        results = one_by_one(asked.asked(target), estimate_asked)
    present(outputs, several_steps(results), several_view, results)


def several_plans(
    target: str,
    asked: ListedRequestFlags,
    budget: str | None,
    solver: SolverFlags,
    outputs: OutputFlags,
    output: str | None,
) -> None:
    """Show a plan for each step in one table; exit code 3 if none of them fits."""
    refuse_with_lists(outputs, output=output)
    with working(outputs):
        from trainfit.api.choose import refuse_infeasible
        from trainfit.api.several import one_by_one, plan_asked
        from trainfit.report.sizes_data import several_steps
        from trainfit.report.text_sizes import several_view

        arguments = solver.arguments(asked.cluster)
        steps = asked.asked(target, of_cluster=not solver.divides(asked.cluster))
        results = one_by_one(steps, lambda step: plan_asked(step, budget, **arguments))
    present(outputs, several_steps(results), several_view, results)
    if not any(result.feasible for result in results):
        refuse_infeasible(results[0])
