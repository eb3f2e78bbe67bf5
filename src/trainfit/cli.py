"""The command line: reads flags, calls the API, prints the result. No logic of its own.

Exit codes: 0 success, 2 a mistake of the user's (one message, no traceback), 3 nothing fits, 130
interrupted. torch takes seconds to import, so everything that needs it is imported inside the commands.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from trainfit import __version__
from trainfit.errors import TrainfitError, UserCodeError

if TYPE_CHECKING:
    from trainfit.costs.pricing import CostSource
    from trainfit.models.recipe import StepOptions
    from trainfit.planning.requests import Solver

INTERRUPTED = 130

app = typer.Typer(
    name="trainfit",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    help="""Does a PyTorch training step fit, and how long does it take, before a GPU is rented?

The step runs a few times on tensors without memory: nothing is computed or
allocated. Its memory is predicted byte by byte and its time op by op.

[bold]Start here[/bold]

  trainfit estimate gpt2 --batch 8 --device a100-40gb   a built-in model
  trainfit estimate train.py:build --device h100        your own step
  trainfit verify gpt2-tiny                             predicted and measured
  trainfit order gpt2                                   a better order of its graph
  trainfit devices                                      what --device knows
""",
)

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        show_default=False,
        help="file.py:function or package.module:function that returns a trainfit.Step, "
        "hf:DIRECTORY-or-config.json, or a built-in model (gpt2, llama-3-8b, vit-b-16, ...).",
    ),
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        show_default=False,
        help="A name that `trainfit devices` lists, a JSON file of your own, cpu (this machine) or cuda "
        "(the GPU in it). Default: the GPU if there is one, else cpu.",
    ),
]
Batch = Annotated[
    int | None, typer.Option("--batch", metavar="N", show_default=False, help="Samples per step.")
]
Seq = Annotated[int | None, typer.Option("--seq", metavar="N", show_default=False, help="Tokens per sample.")]
ImageSize = Annotated[
    int | None,
    typer.Option("--image-size", metavar="N", show_default=False, help="Side of a square image in pixels."),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", metavar="NAME", show_default=False, help="fp32, bf16, bf16-autocast or fp16-autocast."
    ),
]
Optimizer = Annotated[
    str | None,
    typer.Option(
        "--optimizer",
        metavar="NAME",
        show_default=False,
        help="adamw, adamw-foreach, adamw-fused, adamw-for-loop, sgd or none.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        show_default=False,
        help="Any parameter of your own function, any setting of a built-in model (layers=4) or field of an "
        "hf: config (hidden_size=1024). Repeat for more.",
    ),
]
Task = Annotated[
    str | None,
    typer.Option(
        "--task",
        metavar="NAME",
        show_default=False,
        help="What an hf: model is trained for, e.g. causal-lm. Default: what its config says.",
    ),
]
Costs = Annotated[
    str,
    typer.Option(
        "--costs",
        metavar="SOURCE",
        help="roofline: time from formulas, on any device. measured: run every operator of the step once on "
        "this machine, which has to be the device, and remember the result.",
    ),
]
Refresh = Annotated[
    bool, typer.Option("--refresh", help="With --costs measured: measure again what is remembered.")
]
JsonFile = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        show_default=False,
        help="Write the result as one JSON object; - is standard output, and then nothing else goes there.",
    ),
]


@app.callback(invoke_without_command=True)
def trainfit(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Handle what comes before a command."""
    if version:
        typer.echo(f"trainfit {__version__}")
        raise typer.Exit


@app.command()
def estimate(
    target: Target,
    device: DeviceName = None,
    batch: Batch = None,
    seq: Seq = None,
    image_size: ImageSize = None,
    dtype: Dtype = None,
    optimizer: Optimizer = None,
    set: Set = None,
    task: Task = None,
    costs: Costs = "roofline",
    refresh: Refresh = False,
    json: JsonFile = None,
    save_trace: Annotated[
        str | None,
        typer.Option(
            "--save-trace", metavar="FILE", show_default=False, help="Write the captured trace for later use."
        ),
    ] = None,
) -> None:
    """Predict the peak memory and the time of a training step, what they consist of and where they go.

    [bold]Examples[/bold]

      trainfit estimate gpt2 --batch 8 --seq 1024 --device a100-40gb
      trainfit estimate llama-3-8b --seq 8192 --optimizer sgd --device h100
      trainfit estimate train.py:build --device rtx-4090 --json result.json
      trainfit estimate hf:config.json --batch 4 --dtype bf16 --device h100
      trainfit estimate resnet-18 --device cpu --costs measured

    --batch, --seq, --image-size, --dtype and --optimizer set the step of
    built-in and hf: models. A function of your own gets those that you give as
    parameters of the same name. It and the step's run() are executed a few
    times, on tensors without memory. Files, sockets and logging in them happen,
    except that no tensors are written and no older files are removed.
    """
    with _user_errors():
        from trainfit.report import json_result, progress, text

        for path, flag in ((json, "--json"), (save_trace, "--save-trace")):
            if path is not None:
                json_result.check_destination(path, flag)
        with _standard_output_for(json), progress.spinner() as report:
            report("loading torch")
            from trainfit import api, store
            from trainfit.devices import find_device

            found = find_device(device or _default_device())
            options = _options(found.kind, batch, seq, image_size, dtype, optimizer, set)
            result = api.estimate(
                target,
                device=found,
                options=options,
                task=task,
                costs=cast("CostSource", costs),
                refresh=refresh,
                progress=report,
                measuring=report.measuring,
            )
            if save_trace is not None:
                report("saving the trace")
                store.save_trace(result.trace, save_trace)
        if json is not None:
            json_result.write_json(json_result.estimate_json(result), json)
        if json != json_result.STANDARD_OUTPUT:
            text.show(text.estimate_view(result))


@app.command()
def plan(
    target: Target,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="SIZE",
            show_default=False,
            help="Memory for tensors: 24GiB, 24GB, 80% of the device. Default: what the device has, less a "
            "margin for what is not simulated.",
        ),
    ] = None,
    device: DeviceName = None,
    batch: Batch = None,
    seq: Seq = None,
    image_size: ImageSize = None,
    dtype: Dtype = None,
    optimizer: Optimizer = None,
    set: Set = None,
    task: Task = None,
    costs: Costs = "roofline",
    refresh: Refresh = False,
    seconds: Annotated[
        float,
        typer.Option("--seconds", metavar="N", help="Stop solving after this long, with the best so far."),
    ] = 30.0,
    solver: Annotated[
        str,
        typer.Option(
            "--solver",
            metavar="NAME",
            help="regions: finds what to checkpoint and keep, op by op; the better plans. modules: PyTorch's "
            "formulation, for the units that you name.",
        ),
    ] = "regions",
    ac_unit: Annotated[
        list[str] | None,
        typer.Option(
            "--ac-unit",
            metavar="NAME",
            show_default=False,
            help="With --solver modules: a module that may be checkpointed, such as blocks.0; blocks.* is "
            "all of them. Repeat for more. Default: every module that has modules inside.",
        ),
    ] = None,
    fsdp_unit: Annotated[
        list[str] | None,
        typer.Option(
            "--fsdp-unit",
            metavar="NAME",
            show_default=False,
            help="With --solver modules: a module that FSDP shards as a unit; nothing around it is "
            "checkpointed. Repeat for more.",
        ),
    ] = None,
    world_size: Annotated[
        int,
        typer.Option(
            "--world-size",
            metavar="N",
            help="With --solver modules: processes that parameters, gradients and optimizer state are "
            "divided among. What FSDP gathers and sends is not counted.",
        ),
    ] = 1,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", show_default=False, help="Write the plan, to apply it."
        ),
    ] = None,
    json: JsonFile = None,
) -> None:
    """Find the fastest way to make a step fit: what to keep, and what to compute again in backward.

    Exit code 3 if no plan fits; the smallest reachable peak is in the message.

    [bold]Examples[/bold]

      trainfit plan llama-3-8b --device h100
      trainfit plan gpt2 --batch 32 --budget 24GiB --device a100-40gb -o plan.json
      trainfit plan llama-3-8b --solver modules --ac-unit "blocks.*" \\
          --fsdp-unit "blocks.*" --world-size 8 --device h100

    A training script needs two lines: plan = trainfit.load_plan("plan.json") and
    trainfit.apply(model, plan).
    """
    with _user_errors():
        from trainfit.report import json_result, progress, text

        for path, flag in ((json, "--json"), (output, "--output")):
            if path is not None:
                json_result.check_destination(path, flag)
        with _standard_output_for(json), progress.spinner() as report:
            report("loading torch")
            from trainfit import api, plan_store
            from trainfit.devices import find_device
            from trainfit.errors import BudgetTooSmall
            from trainfit.planning.infeasible import too_small

            found = find_device(device or _default_device())
            options = _options(found.kind, batch, seq, image_size, dtype, optimizer, set)
            result = api.plan_step(
                target,
                budget=budget,
                device=found,
                options=options,
                task=task,
                costs=cast("CostSource", costs),
                refresh=refresh,
                seconds_limit=seconds,
                solver=cast("Solver", solver),
                ac_units=ac_unit or None,
                fsdp_units=fsdp_unit or (),
                world_size=world_size,
                progress=report,
                measuring=report.measuring,
            )
        if output is not None and result.feasible:
            plan_store.save_plan(result.plan, output)
        if json is not None:
            json_result.write_json(json_result.plan_json(result), json)
        if json != json_result.STANDARD_OUTPUT:
            text.show(text.plan_view(result))
        if not result.feasible:
            raise BudgetTooSmall(too_small(result), result.plan.peak_bytes)


@app.command()
def frontier(
    target: Target,
    device: DeviceName = None,
    batch: Batch = None,
    seq: Seq = None,
    image_size: ImageSize = None,
    dtype: Dtype = None,
    optimizer: Optimizer = None,
    set: Set = None,
    task: Task = None,
    costs: Costs = "roofline",
    refresh: Refresh = False,
    points: Annotated[int, typer.Option("--points", metavar="N", help="How many budgets to solve for.")] = 16,
    json: JsonFile = None,
) -> None:
    """Show the least time of a step for every peak, from the smallest reachable to no plan at all.

    [bold]Examples[/bold]

      trainfit frontier gpt2 --batch 8 --device a100-40gb
      trainfit frontier llama-3-8b --device h100 --json frontier.json
    """
    with _user_errors():
        from trainfit.report import json_result, progress, text

        if json is not None:
            json_result.check_destination(json, "--json")
        with _standard_output_for(json), progress.spinner() as report:
            report("loading torch")
            from trainfit import api
            from trainfit.devices import find_device

            found = find_device(device or _default_device())
            options = _options(found.kind, batch, seq, image_size, dtype, optimizer, set)
            result = api.frontier(
                target,
                device=found,
                options=options,
                task=task,
                costs=cast("CostSource", costs),
                refresh=refresh,
                points=points,
                progress=report,
                measuring=report.measuring,
            )
        if json is not None:
            json_result.write_json(json_result.frontier_json(result), json)
        if json != json_result.STANDARD_OUTPUT:
            text.show(text.frontier_view(result))


@app.command()
def verify(
    target: Target,
    batch: Batch = None,
    seq: Seq = None,
    image_size: ImageSize = None,
    dtype: Dtype = None,
    optimizer: Optimizer = None,
    set: Set = None,
    task: Task = None,
    plan: Annotated[
        str | None,
        typer.Option(
            "--plan", metavar="FILE", show_default=False, help="Run the step with this plan, and without it."
        ),
    ] = None,
    costs: Costs = "measured",
    force: Annotated[
        bool, typer.Option("--force", help="Run even if this machine's memory may not suffice.")
    ] = False,
    eager: Annotated[
        bool, typer.Option("--eager", help="Run what the step compiles without the compiler.")
    ] = False,
    runs: Annotated[
        int | None,
        typer.Option("--runs", metavar="N", show_default=False, help="Time at most N steps. Default: 10."),
    ] = None,
    json: JsonFile = None,
) -> None:
    """Run the real step on this machine and compare measured peak memory and time with the predicted ones.

    On a CPU the measure is every allocation that the profiler sees, on a GPU
    the statistics of torch's allocator. A step that may not fit into the free
    memory of this machine is refused; --force runs it all the same.
    A compiled step runs compiled, and is compared with the predicted eager one.

    [bold]Examples[/bold]

      trainfit verify gpt2-tiny
      trainfit verify train.py:build --json result.json
      trainfit verify resnet-18 --batch 4 --dtype bf16-autocast
      trainfit verify gpt2-tiny --plan plan.json
    """
    with _user_errors():
        from trainfit.report import json_result, progress, text

        if json is not None:
            json_result.check_destination(json, "--json")
        with _standard_output_for(json), progress.spinner() as report:
            report("loading torch")
            from trainfit import api

            options = _options(_default_device(), batch, seq, image_size, dtype, optimizer, set)
            result = api.verify(
                target,
                options=options,
                task=task,
                plan=plan,
                costs=cast("CostSource", costs),
                force=force,
                eager=eager,
                runs=runs,
                progress=report,
                measuring=report.measuring,
            )
        if json is not None:
            json_result.write_json(json_result.verification_json(result), json)
        if json != json_result.STANDARD_OUTPUT:
            text.show(text.verification_view(result))


@app.command()
def order(
    graph_or_target: Annotated[
        str,
        typer.Argument(
            metavar="GRAPH.json|TARGET",
            show_default=False,
            help="A graph in the schema that inductor exports, or a TARGET as the other commands take it.",
        ),
    ],
    graph: Annotated[
        str,
        typer.Option(
            "--graph",
            metavar="KIND",
            help="What a TARGET's graph is. joint: forward and backward as a compiler sees them. "
            "eager: the captured step as it runs without one.",
        ),
    ] = "joint",
    batch: Batch = None,
    seq: Seq = None,
    image_size: ImageSize = None,
    dtype: Dtype = None,
    optimizer: Optimizer = None,
    set: Set = None,
    task: Task = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds",
            metavar="N",
            show_default=False,
            help="Search on until the order is proved optimal or this time is over. "
            "Default: a fixed effort, the same on every machine.",
        ),
    ] = None,
    json: JsonFile = None,
) -> None:
    """Lower the peak of a graph by running its nodes in another order, and say how good that order is.

    [bold]Examples[/bold]

      trainfit order graph.json
      trainfit order gpt2 --batch 8 --seq 1024 --json order.json
      trainfit order train.py:build --graph eager

    To compile a model in the better order, write trainfit.order.install() before
    torch.compile.
    """
    with _user_errors():
        from trainfit.report import json_result, orders, progress, text

        if json is not None:
            json_result.check_destination(json, "--json")
        with _standard_output_for(json), progress.spinner() as report:
            from trainfit.order_fronts.answer import is_graph_file, order_anything

            options = None
            if not is_graph_file(graph_or_target):
                report("loading torch")
                options = _options("cpu", batch, seq, image_size, dtype, optimizer, set)
            result = order_anything(
                graph_or_target, graph=graph, options=options, task=task, seconds=seconds, progress=report
            )
        if json is not None:
            json_result.write_json(orders.order_json(result), json)
        if json != json_result.STANDARD_OUTPUT:
            text.show(orders.order_view(result))


@app.command()
def devices(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", show_default=False, help="Show one device, however its name is written."
        ),
    ] = None,
) -> None:
    """List the devices that --device knows, or everything known about one.

    [bold]Examples[/bold]

      trainfit devices
      trainfit devices "NVIDIA H100 80GB HBM3"
      trainfit devices my-device.json
    """
    with _user_errors():
        from trainfit.devices import find_device, known_devices
        from trainfit.report import text

        text.show(text.devices_view(known_devices()) if name is None else text.device_view(find_device(name)))


def main() -> None:
    """Run the command line; the console script `trainfit` calls this."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal that cannot show a sign gets a replacement instead of a traceback.
            stream.reconfigure(errors="replace")
    app()


def _options(
    device: str,
    batch: int | None,
    seq: int | None,
    image_size: int | None,
    dtype: str | None,
    optimizer: str | None,
    set: list[str] | None,
) -> StepOptions:
    from trainfit.models.recipe import StepOptions
    from trainfit.targets.given_values import read_assignments

    # StepOptions checks the choices itself.
    chosen: dict[str, Any] = {"dtype": dtype, "optimizer": optimizer, "set": read_assignments(set or ())}
    return StepOptions(batch=batch, seq=seq, image_size=image_size, device=device, **chosen)


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    """Turn our exceptions into one message on standard error and exit code 2; an interrupt into 130."""
    try:
        yield
    except TrainfitError as error:
        if isinstance(error, UserCodeError):
            typer.echo(error.user_traceback, err=True)
        typer.secho("error: ", fg=typer.colors.RED, bold=True, err=True, nl=False)
        typer.echo(str(error), err=True)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


@contextlib.contextmanager
def _standard_output_for(json: str | None) -> Iterator[None]:
    """With `--json -`, send what is printed meanwhile to standard error: that stream is for the JSON alone.

    That includes what the user's code prints, and what C code and child processes write to descriptor 1.
    """
    if json != "-":
        yield
        return
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
