"""The command line: reads flags, calls the API, prints the result. No logic of its own.

Exit codes: 0 success, 2 a mistake of the user's (one message, no traceback), 3 nothing fits, 4 grew by more
than allowed, 130 interrupted. torch takes seconds to import, so everything that needs it is imported inside
the commands.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import Annotated

import typer

from trainfit import __version__
from trainfit.basics.doing import doing
from trainfit.cli import cli_options as given
from trainfit.cli.cli_running import command, present, working
from trainfit.cli.compile_commands import compiled_plan, verify_compiled
from trainfit.cli.compile_options import CompileFlags, refuse_with_compile, refuse_without_compile
from trainfit.cli.device_commands import calibrate, devices
from trainfit.cli.fit_commands import fit
from trainfit.cli.grid_commands import add_grid_commands
from trainfit.cli.help_layout import fitted
from trainfit.cli.help_text import HELP
from trainfit.cli.list_options import ListedRequestFlags
from trainfit.cli.scale_commands import register_scale_commands
from trainfit.cli.size_commands import register_size_commands, several_estimates, several_plans
from trainfit.cli.solver_options import Offload, SolverFlags

app = typer.Typer(
    name="trainfit",
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    help=fitted(HELP),
)


@app.callback(invoke_without_command=True)
def trainfit(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Handle what comes before a command."""
    if version:
        typer.echo(f"trainfit {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        from trainfit.report.tables import show
        from trainfit.report.text_start import FirstWords

        show(FirstWords())


@command(app)
def estimate(
    target: given.Target,
    asked: ListedRequestFlags,
    compiling: CompileFlags,
    outputs: given.StepOutputFlags,
    save_trace: given.SaveTrace = None,
) -> None:
    """Predict the peak memory and the time of a training step, what they consist of and where they go.

    [bold]Examples[/bold]

      trainfit estimate gpt2 --batch 8 --seq 1024 --device a100-40gb
      trainfit estimate llama-3-8b --seq 8192 --optimizer sgd --device h100
      trainfit estimate train.py:build --device rtx-4090 --json result.json
      trainfit estimate hf:config.json --batch 4 --dtype bf16 --device h100
      trainfit estimate resnet-18 --device cpu --costs measured
      trainfit estimate train.py:build --world-size 64 --device h100
      trainfit estimate llama-3-70b --mesh dp=8,tp=8 --device h100
      trainfit estimate gpt2 --batch 8,16,max --device a100-40gb,h100
      trainfit estimate gpt2 --device h100 --compile

    --batch, --seq, --image-size, --dtype and --optimizer set the step of
    built-in and hf: models. A function of your own gets those that you give as
    parameters of the same name, and any other by --set. It and the step's run()
    are executed a few times, on tensors without memory. Files, sockets and
    logging in them happen, except that no tensors are written and no older
    files are removed.
    """
    compiled = compiling.asked()
    if compiled:
        refuse_with_compile(lists=asked.has_lists)
    if asked.has_lists:
        several_estimates(target, asked, outputs, save_trace)
        return
    with working(outputs, save_trace=save_trace):
        from trainfit.api.several import estimate_asked
        from trainfit.report.reading import estimate_data
        from trainfit.report.text_estimates import estimate_view
        from trainfit.traces import trace_store as store

        step = asked.asked(target)[0]
        outputs.check_speed(step.request)
        if compiled:
            from trainfit.api.compiled_steps import estimate_compiled_step

            result = estimate_compiled_step(step.single(), **compiling.arguments())
        else:
            result = estimate_asked(step)
        if save_trace is not None:
            doing("saving the trace")
            store.save_trace(result.trace, save_trace)
    present(outputs, estimate_data(result), estimate_view, result)


@command(app)
def plan(
    target: given.Target,
    *,
    budget: given.Budget = None,
    asked: ListedRequestFlags,
    compiling: CompileFlags,
    solver: SolverFlags,
    output: given.Output = None,
    outputs: given.StepOutputFlags,
) -> None:
    """Find the fastest way to make a step fit: what to keep, and what to compute again in backward.

    Exit code 3 if no plan fits; the smallest reachable peak is in the message.

    [bold]Examples[/bold]

      trainfit plan llama-3-8b --device h100
      trainfit plan gpt2 --batch 32 --budget 24GiB --device a100-40gb -o plan.json
      trainfit plan gpt2 --batch 32 --device rtx-4090 --offload
      trainfit plan llama-3-70b --mesh dp=16,tp=4 --device h100
      trainfit plan gpt2 --batch 32 --device rtx-4090 --compile -o plan.json
      trainfit plan llama-3-8b --solver modules --ac-unit "blocks.*" \\
          --fsdp-unit "blocks.*" --world-size 8 --device h100

    A training script needs two lines: plan = trainfit.load_plan("plan.json") and
    trainfit.apply(model, plan). With --compile the plan is for torch.compile,
    before or after which it is applied.
    """
    if compiling.asked():
        compiled_plan(target, budget, asked, compiling, solver, outputs, output)
        return
    if asked.has_lists:
        several_plans(target, asked, budget, solver, outputs, output)
        return
    with working(outputs, output=output):
        from trainfit.api import choose
        from trainfit.api.several import plan_asked
        from trainfit.plans import plan_store
        from trainfit.report.reading import plan_data
        from trainfit.report.text_plans import plan_view

        step = asked.asked(target, of_cluster=not solver.divides(asked.cluster))[0]
        outputs.check_speed(step.request)
        result = plan_asked(step, budget, **solver.arguments(asked.cluster))
    if output is not None and result.feasible:
        plan_store.save_plan(result.plan, output)
    present(outputs, plan_data(result), plan_view, result)
    choose.refuse_infeasible(result)


command(app)(fit)


@command(app)
def frontier(
    target: given.Target,
    *,
    asked: given.RequestFlags,
    points: given.Points = 16,
    offload: Offload = False,
    outputs: given.OutputFlags,
) -> None:
    """Show the least time of a step for every peak, from the smallest reachable to no plan at all.

    [bold]Examples[/bold]

      trainfit frontier gpt2 --batch 8 --device a100-40gb
      trainfit frontier llama-3-8b --device h100 --json frontier.json
    """
    with working(outputs):
        from trainfit.api import choose
        from trainfit.report.reading import frontier_data
        from trainfit.report.text_plans import frontier_view

        result = choose.frontier_step(asked.request(target), points, offload=offload)
    present(outputs, frontier_data(result), frontier_view, result)


register_size_commands(app)


@command(app)
def verify(
    target: given.Target,
    asked: given.VerifyFlags,
    compiling: CompileFlags,
    outputs: given.OutputFlags,
) -> None:
    """Run the real step on this machine and compare measured peak memory and time with the predicted ones.

    On a CPU the measure is every allocation that the profiler sees, on a GPU
    the statistics of torch's allocator. A step that may not fit into the free
    memory of this machine is refused; --force runs it all the same.
    A compiled step runs compiled, and is compared with the predicted eager one;
    with --compile, or a plan for torch.compile, with the predicted compiled one.

    [bold]Examples[/bold]

      trainfit verify gpt2-tiny
      trainfit verify train.py:build --json result.json
      trainfit verify resnet-18 --batch 4 --dtype bf16-autocast
      trainfit verify gpt2-tiny --plan plan.json
      trainfit verify gpt2-tiny --way way.json
      trainfit verify gpt2-tiny --compile --budget 40MiB
      torchrun --nproc-per-node 4 -m trainfit verify train.py:build

    Under torchrun every process is a rank: each is predicted and measured, on
    the CPU, and all are compared by phase.
    """
    if compiling.asked() or asked.compiled_plan() is not None:
        verify_compiled(target, asked, compiling, outputs)
        return
    refuse_without_compile(budget=asked.budget)
    with working(outputs):
        from trainfit.api import prove
        from trainfit.report.rank_report import rank_verification_data, rank_verification_view
        from trainfit.report.reading import verification_data
        from trainfit.report.text_verification import verification_view
        from trainfit.verifying.verification import Verification

        result = prove.verify_step(asked.request(target), **asked.arguments())
    if isinstance(result, Verification):
        present(outputs, verification_data(result), verification_view, result)
    elif result.rank == 0:  # one of several processes shows what all of them have found
        present(outputs, rank_verification_data(result), rank_verification_view, result)


@command(app)
def order(
    graph_or_target: given.GraphOrTarget,
    *,
    graph: given.GraphKind = "joint",
    step: given.StepFlags,
    seconds: given.OrderSeconds = None,
    outputs: given.OutputFlags,
) -> None:
    """Lower the peak of a graph by running its nodes in another order, and say how good that order is.

    [bold]Examples[/bold]

      trainfit order graph.json
      trainfit order gpt2 --batch 8 --seq 1024 --json order.json
      trainfit order train.py:build --graph eager

    To compile a model in the better order, write trainfit.order.install() before
    torch.compile.
    """
    with working(outputs):
        from trainfit.api.arrange import order_anything
        from trainfit.order_fronts.order_result import is_graph_file
        from trainfit.report.reading import order_data
        from trainfit.report.text_orders import order_view

        result = order_anything(
            graph_or_target,
            graph=graph,
            options=None if is_graph_file(graph_or_target) else step.options(),
            task=step.task,
            seconds=seconds,
        )
    present(outputs, order_data(result), order_view, result)


add_grid_commands(app)
register_scale_commands(app)


@command(app)
def diff(
    old: given.OldResult,
    new: given.NewResult,
    *,
    allowed: given.GrowthFlags,
    outputs: given.OutputFlags,
) -> None:
    """Show what grew between two results, or two traces: by how much, in which modules and operators.

    OLD and NEW are files that --json (estimate, plan) or --save-trace wrote.
    With --max-peak or --max-time the exit code is 4 if more grew than that: a
    gate for memory and time in CI.

    [bold]Examples[/bold]

      trainfit estimate train.py:build --device h100 --json new.json
      trainfit diff old.json new.json
      trainfit diff old.json new.json --max-peak 2% --max-time 5%
      trainfit diff old-trace.json new-trace.json --device h100 --csv tables

    Other settings, another device or another torch are said first: the figures
    are compared all the same, but a gate refuses another device or cluster.
    """
    with working(outputs):
        from trainfit.diffing.what_grew import diff as what_grew
        from trainfit.report.text_diffs import diff_view

        result = what_grew(old, new, **allowed.arguments())
    present(outputs, result.data, diff_view, result)
    result.check()


command(app)(calibrate)
command(app)(devices)


def main() -> None:
    """Run the command line; the console script `trainfit` calls this."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal that cannot show a sign gets a replacement instead of a traceback.
            stream.reconfigure(errors="replace")
    try:
        app()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        # Files say where they are; this was standard output.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains once more when it ends
        sys.stderr.write(f"error: cannot write to standard output: {error.strerror}.\n")
        raise SystemExit(2) from None
