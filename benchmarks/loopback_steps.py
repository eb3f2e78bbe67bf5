"""Steps of several real processes over gloo on this machine: predicted against measured seconds.

    python benchmarks/loopback_steps.py [--rounds 9] [--ranks 2] [--model NAME] [--cache FILE] [--csv FILE]

Two and four processes train a small Llama and a small GPT-2 on the same samples, divided by several meshes.
First all processes together measure what collectives take, of each kind and in groups of each size: the
seconds of one that exchanges next to nothing, and the bytes a second beyond that. They do so between pieces
of other work, whose time alone is subtracted: what the other processes leave of the caches meanwhile, which
the work then has to read again, is a part of what an exchange takes. Then the first process measures its
Python, while another process works on each other core, and its operators, while all others work, as in a
step. Of these the time of a step is predicted. At last the steps run, each mesh several times in a row, in
rounds, and the median counts.

Steps and collectives are measured in processor time, of all threads of the first process: the machine may be
busy with other work, and may have fewer cores than there are processes, and then the time on the wall says
more about who else wants the cores. It is measured too, and written down. On processors that are free, with a
core for each process, the two differ by what a process waits for the others.

Bounds: the predicted seconds within 20 %, and of the meshes of each number of ranks the predicted order is
the measured one; two that are measured within 5 % of each other may change places. Exit code 1 if one is
missed.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from forked_ranks import run_ranks
from result_files import arguments, write_rows

BOUND, SAME = 0.20, 0.05
SAMPLES = 32
"""Of all copies of the model together."""
SIZES = (1 << 10, 1 << 18, 1 << 21, 1 << 23)
_TRIES, _REPEATED = 9, 4
_IN_A_ROW = 3
"""Steps of one mesh; the first finds the caches as another mesh left them, and does not count."""
_BUDGET = 2.5
"""Seconds for the operators of a step."""

Mesh = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Row:
    """One model on one mesh."""

    model: str
    mesh: str
    ranks: int
    predicted_seconds: float
    measured_seconds: float
    communication_seconds: float
    """Predicted."""
    spread: float
    """Between the quartiles of the rounds, relative to the median."""
    wall_seconds: float
    """The median over rounds by the clock on the wall."""

    @property
    def error(self) -> float:
        """Relative, with its sign."""
        return self.predicted_seconds / self.measured_seconds - 1


MESHES: dict[int, tuple[Mesh, ...]] = {
    2: ((("dp", 2),), (("replicate", 2),), (("tp", 2),)),
    4: (
        (("dp", 4),),
        (("replicate", 4),),
        (("replicate", 2), ("tp", 2)),
        (("dp", 2), ("tp", 2)),
        (("replicate", 2), ("dp", 2)),
    ),
}
MODELS = {"llama-tiny": 256, "gpt2-tiny": 256}
"""Built-in models, and the length of their sequences."""


def main() -> int:
    """Run the benchmark; 1 if a bound is missed."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="how often every step is measured")
    parser.add_argument("--ranks", type=int, choices=sorted(MESHES), help="only so many")
    parser.add_argument("--model", choices=sorted(MODELS), help="only this one")
    parser.add_argument("--cache", type=Path, help="keep what operators take in this file")
    options = parser.parse_args()
    rows: list[Row] = []
    for ranks in sorted(MESHES) if options.ranks is None else [options.ranks]:
        for model in MODELS if options.model is None else [options.model]:
            run = functools.partial(run_rank, model, ranks, options.rounds, options.cache)
            found = of_first_rank(model, ranks, run_ranks(run, ranks, seconds=3600.0)[0])
            show(found)
            rows += found
    bounds = list(judged(rows))
    for text, holds in bounds:
        print(f"{'holds ' if holds else 'MISSED'} {text}")
    everything = options.ranks is None and options.model is None
    write_rows("loopback_steps", rows, options.csv, everything=everything)
    return 0 if all(holds for _, holds in bounds) else 1


def show(rows: list[Row]) -> None:
    """Print one line per row."""
    for row in rows:
        print(
            f"{row.ranks} ranks {row.model:12} {row.mesh:20} predicted {row.predicted_seconds * 1e3:8.1f} ms "
            f"({row.communication_seconds * 1e3:7.1f} communication), measured "
            f"{row.measured_seconds * 1e3:8.1f} ms ({row.wall_seconds * 1e3:8.1f} on the wall), "
            f"{row.error:+7.1%}, spread {row.spread:.0%}",
            flush=True,
        )


def judged(rows: list[Row]) -> Iterator[tuple[str, bool]]:
    """Yield each bound in words, and whether it holds."""
    errors = [abs(row.error) for row in rows]
    within = sum(error <= BOUND for error in errors)
    text = f"{within} of {len(rows)} within {BOUND:.0%}, median {statistics.median(errors):.1%}"
    yield text, within == len(rows)
    for model, ranks in sorted({(row.model, row.ranks) for row in rows}):
        chosen = [row for row in rows if (row.model, row.ranks) == (model, ranks)]
        wrong = [
            f"{one.mesh} and {other.mesh}"
            for one, other in itertools.combinations(chosen, 2)
            if abs(one.measured_seconds / other.measured_seconds - 1) > SAME
            and (one.measured_seconds < other.measured_seconds)
            != (one.predicted_seconds < other.predicted_seconds)
        ]
        text = f"order of {len(chosen)} meshes of {ranks} ranks, {model}"
        yield f"{text}{': ' + ', '.join(wrong) if wrong else ''}", not wrong


def of_first_rank(model: str, ranks: int, found: dict[str, Any]) -> list[Row]:
    """Return the rows of one model on so many ranks."""
    rows = []
    for name, rounds in found["measured"].items():
        seconds, wall = zip(*rounds)
        middle = statistics.median(seconds)
        quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [middle] * 3
        predicted, communication = found["predicted"][name]
        spread = (quartiles[2] - quartiles[0]) / middle
        rows.append(
            Row(model, name, ranks, predicted, middle, communication, spread, statistics.median(wall))
        )
    return rows


def mesh_name(mesh: Mesh) -> str:
    """Write a mesh as on the command line."""
    return ",".join(f"{name}={size}" for name, size in mesh)


# ------------------------------------------------------------------------------------------ on one rank


def run_rank(model: str, ranks: int, rounds: int, cache: Path | None) -> dict[str, Any]:
    """Measure what this rank's steps are made of, predict them, and run them."""
    import torch
    import torch.distributed as dist

    from trainfit.costs import this_machine

    torch.set_num_threads(1)
    say(f"{model} on {ranks} ranks: capturing")
    first = os.environ["RANK"] == "0"
    meshes = MESHES[ranks] if first else ()
    traces = {mesh_name(mesh): captured(model, mesh, ranks) for mesh in meshes}
    dist.init_process_group("gloo")
    say("measuring exchanges")
    device = with_exchanges(ranks)
    say("measuring operators")
    with tempfile.TemporaryDirectory() as folder:
        file = cache or Path(folder) / "costs.db"
        with beside_others("machine", len(os.sched_getaffinity(0)) - 1):
            if first:
                this_machine.with_speed(device, cache_path=file)
                this_machine.host(distributed=True, cache_path=file)
        with beside_others("operators", ranks - 1):
            predicted = {name: predict(trace, device, file) for name, trace in traces.items()}
    say("running the steps")
    steps = {mesh_name(mesh): built(model, mesh, ranks) for mesh in MESHES[ranks]}
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for number in range(rounds + 2):
        for name, run in steps.items():
            seconds = [timed(run) for _ in range(_IN_A_ROW)]
            if number >= 2:  # the first steps make what later ones find
                measured[name] += seconds[1:]
    return {"predicted": predicted, "measured": measured}


@contextlib.contextmanager
def beside_others(what: str, count: int) -> Iterator[None]:
    """Let so many other processes work while the first measures something."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    rank, store = dist.get_rank(), _get_default_store()
    yield
    if rank == 0:
        store.set(what, "measured")
    work = some_work()
    while 0 < rank <= count and not store.check([what]):
        work()
    dist.barrier()


def some_work() -> Callable[[], object]:
    """Return what works for some milliseconds, with more memory than the caches of a core have."""
    import torch

    rows, weights, values = torch.randn(512, 256), torch.randn(256, 1024), torch.randn(1 << 20)

    def work() -> None:
        for _ in range(4):
            torch.nn.functional.gelu(values + rows.mm(weights).mean())

    return work


def say(text: str) -> None:
    """Tell who waits what the first rank does."""
    if os.environ["RANK"] == "0":
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def step_options(model: str, mesh: Mesh, ranks: int) -> Any:
    """Return the options of a step: all meshes train on as many samples in all."""
    from trainfit.models.recipe import StepOptions
    from trainfit.traces.ranks import Cluster

    cluster = Cluster(ranks, int(os.environ["RANK"]), mesh=mesh)
    options = StepOptions(batch=SAMPLES // cluster.copies, seq=MODELS[model])
    return replace(options, cluster=cluster)


def captured(model: str, mesh: Mesh, ranks: int) -> Any:
    """Return the trace of this rank's step."""
    import trainfit

    options = step_options(model, mesh, ranks)
    plain = replace(options, cluster=None)
    return trainfit.capture(model, device="cpu", cluster=options.cluster, options=plain)


def built(model: str, mesh: Mesh, ranks: int) -> Callable[[], object]:
    """Return the real step of this rank."""
    from trainfit.targets import load

    run: Callable[[], object] = load(model, step_options(model, mesh, ranks)).build().run
    return run


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Return the processor time of one step, and that on the wall; all ranks begin together."""
    import torch.distributed as dist

    gc.collect()
    dist.barrier()
    begin, wall = time.process_time(), time.perf_counter()
    run()
    return time.process_time() - begin, time.perf_counter() - wall


def predict(trace: Any, device: Any, cache: Path) -> tuple[float, float]:
    """Return the predicted seconds of a step, and of its communication."""
    from trainfit.costs import this_machine
    from trainfit.costs.constants import constants_of
    from trainfit.costs.measured_costs import measured_costs
    from trainfit.costs.roofline import Roofline
    from trainfit.costs.schedule import schedule

    speedy, _ = this_machine.with_speed(device, cache_path=cache)
    host, _ = this_machine.host(distributed=True, cache_path=cache)
    fallback = Roofline(speedy, constants_of(speedy), trace.tf32, None, trace.cluster).price
    table = measured_costs(
        trace, speedy, fallback=fallback, host=host, cache_path=cache, budget_seconds=_BUDGET
    )
    times = schedule(trace, table)
    return times.step_seconds, times.communication_seconds


def with_exchanges(ranks: int) -> Any:
    """Return this machine with what its processes take to exchange something, in groups of every size."""
    import torch.distributed as dist

    from trainfit.costs.measured_exchanges import exchange_name
    from trainfit.devices.device_table import this_cpu

    seconds: dict[str, float] = {}
    rates: dict[str, float] = {}
    for size in (size for size in (2, 4) if size <= ranks):
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, ranks, size)]
        group = groups[dist.get_rank() // size]
        for kind, exchange in exchanges(size, group).items():
            name = exchange_name(kind, size)
            seconds[name], rates[name] = measured_link(exchange)
    return replace(this_cpu(), exchange_seconds=seconds, exchange_bytes_per_second=rates)


Exchange = Callable[[], object]


def exchanges(size: int, group: Any) -> dict[str, Callable[[int], Exchange]]:
    """Return what makes each kind of collective of so many bytes, the larger of what goes in and comes out.

    What it works on is made before, and not timed: a step has ops of its own for that, which are priced.
    """
    import torch
    import torch.distributed as dist

    def gather(count: int) -> Exchange:
        whole = torch.zeros(count // 4 // size * size)
        part = whole[: len(whole) // size].clone()
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)

    def scatter(count: int) -> Exchange:
        whole = torch.zeros(count // 4 // size * size)
        part = whole[: len(whole) // size].clone()
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)

    def reduce(count: int) -> Exchange:
        whole = torch.zeros(count // 4)
        return lambda: dist.all_reduce(whole, group=group)

    return {"all_gather": gather, "reduce_scatter": scatter, "all_reduce": reduce}


def measured_link(exchange: Callable[[int], Exchange]) -> tuple[float, float]:
    """Return the seconds of an exchange of nothing, and the bytes a second beyond: a line through medians.

    The line has the least squares of relative errors, so that small exchanges count as much as large ones.
    """
    import torch.distributed as dist

    def seconds(run: Exchange) -> float:
        dist.barrier()
        begin = time.process_time()
        for _ in range(_REPEATED):
            work()
            run()
        return (time.process_time() - begin) / _REPEATED

    work, rounds = some_work(), []
    for _ in range(_TRIES + 1):
        without = seconds(lambda: None)
        rounds.append([seconds(exchange(size)) - without for size in SIZES])
    # Work takes now longer, now less: an exchange is not said to take less than a call.
    medians = [max(statistics.median(times), 1e-5) for times in zip(*rounds[1:])]
    weights = [1 / middle**2 for middle in medians]
    total = math.fsum(weights)
    mean_size = math.fsum(w * s for w, s in zip(weights, SIZES)) / total
    mean_time = math.fsum(w * m for w, m in zip(weights, medians)) / total
    slope = math.fsum(w * (s - mean_size) * (m - mean_time) for w, s, m in zip(weights, SIZES, medians))
    slope /= math.fsum(w * (s - mean_size) ** 2 for w, s in zip(weights, SIZES))
    slope = max(slope, 1e-12)
    return max(mean_time - slope * mean_size, 1e-6), 1 / slope


if __name__ == "__main__":
    sys.exit(main())
