"""Plans with copies to the host: the best of all, what they promise, and where copies run."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

import trainfit
from trainfit import Step, Trace
from trainfit.allocator.step_columns import columns_of
from trainfit.costs.roofline import roofline_costs
from trainfit.devices.device_table import find_device
from trainfit.devices.library_handles import library_workspaces
from trainfit.errors import OptionError
from trainfit.planning.groups import Group
from trainfit.planning.host_copies import FROM_HOST, TO_HOST, CopyWindow, HostLink, Offloading
from trainfit.planning.minimum_cut import Choice, choice_of
from trainfit.planning.offload_curves import can_be_offloaded, offloading_points, with_copies
from trainfit.planning.planned_columns import PlannedColumns
from trainfit.planning.planner import Planner
from trainfit.planning.replay import replayed
from trainfit.planning.rewrite import rewritten

H100 = find_device("h100")
USUAL = HostLink(5e10, 1e-5, overlaps=True)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build() -> Step:
    model = Blocks(1024, 4).to("cuda")
    inputs = torch.randn(8192, 1024, device="cuda")
    return Step.of(model, (inputs,), loss=lambda out: out.square().mean(), optimizer=None)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return trainfit.capture(build, device=H100)


@pytest.fixture(scope="module", params=[5e10, 1e12], ids=["usual link", "fast link"])
def planner(trace: Trace, request: pytest.FixtureRequest) -> Planner:
    link = HostLink(request.param, 1e-5, overlaps=True)
    return Planner(trace, roofline_costs(trace, H100), None, link)


def random_groups(numbers: random.Random) -> list[Group]:
    """Return groups in a row, each of which reads some of those before it."""
    found: list[Group] = []
    for number in range(6):
        sizes = tuple(numbers.randint(0, 9) * 100 for _ in range(numbers.randint(1, 2)))
        before = [(n, place) for n, group in enumerate(found) for place in range(len(group.sizes))]
        found.append(
            Group(
                ops=(number,),
                reads=frozenset(numbers.sample(before, min(len(before), numbers.randint(0, 2)))),
                storages=tuple(10 * number + place for place in range(len(sizes))),
                sizes=sizes,
                seconds=numbers.randint(1, 20) * 1e-3,
                saved=tuple(numbers.random() < 0.6 for _ in sizes),
                keepable=numbers.random() < 0.9,
                repeatable=numbers.random() < 0.8,
            )
        )
    return found


def every_choice(groups: list[Group], offloading: Offloading, window: CopyWindow) -> Iterator[Choice]:
    """Yield all ways to keep, recompute or offload every group."""
    for decided in itertools.product("kro", repeat=len(groups)):
        repeated, offloaded = (frozenset(n for n, one in enumerate(decided) if one == what) for what in "ro")
        choice = choice_of(groups, repeated, offloaded)
        if not all(groups[n].repeatable for n in repeated) or choice.offloaded != offloaded:
            continue
        if all(groups[n].keepable for n in choice.kept) and all(
            can_be_offloaded(groups[n]) for n in offloaded
        ):
            yield with_copies(groups, choice, offloaded, offloading, window)


@pytest.mark.parametrize("seed", range(12))
def test_the_points_of_a_region_are_the_best_of_all_choices(trace: Trace, seed: int) -> None:
    numbers = random.Random(seed)
    groups = random_groups(numbers)
    offloading = Offloading(trace, HostLink(1e5, 1e-4, overlaps=True), [])
    window = CopyWindow(0, 1, 2, numbers.randint(0, 10) * 1e-3, numbers.randint(0, 10) * 1e-3)
    every = list(every_choice(groups, offloading, window))
    if not every:
        return
    keeping = [choice for choice in every if not choice.offloaded]
    hull = [min(keeping, key=lambda choice: (choice.seconds, choice.bytes))] if keeping else []
    # What copies nothing is found elsewhere.
    points = [*offloading_points(groups, hull, offloading, window), *keeping]
    for limit in {choice.bytes for choice in hull} | {
        max((c.bytes for c in hull), default=0) * n // 5 for n in range(5)
    }:
        best = min((choice.seconds for choice in every if choice.bytes <= limit), default=None)
        found = min((point.seconds for point in points if point.bytes <= limit), default=None)
        if best is None:
            assert found is None
        else:
            assert found == pytest.approx(best, rel=1e-3)


def modelled_peak(planner: Planner, chosen: list[int]) -> int:
    """Return the peak of some options as the master problem sums it up."""
    problem, carried, most = planner.problem, 0, 0
    for peak, covering, entering in zip(problem.peak, problem.covering, problem.entering):
        carried += sum(change for number, change in entering.items() if number in chosen)
        inside = [size for number, size in covering.items() if number in chosen]
        most = max(most, max(inside, default=peak) + carried)
    return most


def random_choices(planner: Planner, count: int) -> Iterator[list[int]]:
    """Yield sets of options that can be chosen together, most of them with copies."""
    numbers = random.Random(count)
    for _ in range(count):
        chosen: list[int] = []
        for number in numbers.sample(range(len(planner.problem.options)), len(planner.problem.options)):
            option = planner.problem.options[number]
            near = {other for chain in planner.problem.exclusive if number in chain for other in chain}
            if near.isdisjoint(chosen) and (option.effects[0].fetched or numbers.random() < 0.1):
                chosen.append(number)
        if any(planner.problem.options[number].effects[0].fetched for number in chosen):
            yield chosen


def test_the_solver_knows_the_peak_of_every_choice(planner: Planner) -> None:
    """Its sums are what the replay of the written trace has, to the byte."""
    tried = list(random_choices(planner, 12))
    assert len(tried) > 5
    for chosen in tried:
        found = planner.certified(chosen, 0, 0.0)
        assert modelled_peak(planner, chosen) == found.timeline.peak_bytes
        found.timeline.trace.check()


def test_an_allocator_is_asked_for_what_the_written_trace_has(trace: Trace, planner: Planner) -> None:
    columns = PlannedColumns(trace, H100)
    for chosen in random_choices(planner, 6):
        effects = [effect for number in chosen for effect in planner.problem.options[number].effects]
        written = rewritten(trace, effects)
        planned, again = columns.of(effects), columns_of(written, library_workspaces(written, H100))
        assert planned is not None and again is not None
        for name, values in vars(planned.sequence(2)).items():
            assert np.array_equal(values, getattr(again.sequence(2), name)), name


def test_a_step_is_as_much_longer_as_copies_do_not_fit_beside_the_next_block(trace: Trace) -> None:
    # GIVEN a link that is too slow for what a block makes, or just fast enough
    costs = roofline_costs(trace, H100)
    for rate in (1e9, 1e10, 1e13):
        planner = Planner(trace, costs, None, HostLink(rate, 0.0, overlaps=True))
        options = [o for o in planner.problem.options if o.effects[0].fetched and not o.effects[0].segment]
        for option in options[:4]:
            # WHEN one region is copied and nothing is recomputed
            replay = replayed(trace, costs, option.effects)
            # THEN the step takes longer by what the copies take less what they run beside
            added = replay.step_seconds - planner.step.step_seconds
            host = option.effects[0].host
            assert host is not None
            copying = sum(trace.storages[s].bytes for s in host.storages) / rate
            waits = [
                max(copying - beside, 0.0) for beside in (host.window.out_seconds, host.window.back_seconds)
            ]
            assert option.effects[0].choice.seconds == pytest.approx(sum(waits), abs=1e-9)
            assert added == pytest.approx(sum(waits), rel=0.02, abs=0.01 * planner.step.step_seconds)


def test_copies_are_on_queues_of_their_own_and_awaited(trace: Trace) -> None:
    planner = Planner(trace, roofline_costs(trace, H100), None, USUAL)
    chosen = next(n for n, option in enumerate(planner.problem.options) if option.effects[0].fetched)
    written = planner.certified([chosen], 0, 0.0).timeline.trace
    out = [n for n, op in enumerate(written.ops) if op.queue == TO_HOST]
    back = [n for n, op in enumerate(written.ops) if op.queue == FROM_HOST]
    assert len(out) == len(back) == len(planner.problem.options[chosen].effects[0].fetched)
    assert all(written.ops[n].phase == "forward" for n in out)
    assert all(written.ops[n].phase == "backward" for n in back)
    # What frees the original waits for the last copy out, and the region's backward for the last one back.
    waiting = {other for op in written.ops for other in op.waits_for}
    assert {out[-1], back[-1]} <= waiting
    fetched = {storage for n in back for storage in written.ops[n].creates}
    readers = [n for n, op in enumerate(written.ops) if fetched.intersection(op.reads)]
    first = min(n for n, op in enumerate(written.ops) if back[-1] in op.waits_for)
    assert min(readers) >= first > back[-1]


def test_offloading_makes_a_plan_faster_never_slower(trace: Trace) -> None:
    costs = roofline_costs(trace, H100)
    without, with_link = Planner(trace, costs, None), Planner(trace, costs, None, HostLink.of(H100))
    smallest, most = without.smallest().peak_bytes, without.step.peak_bytes
    faster = 0
    for part in range(1, 6):
        budget = smallest + (most - smallest) * part // 6
        before, after = without.plan(budget), with_link.plan(budget)
        assert after.fits
        assert after.step_seconds <= before.step_seconds * (1 + 1e-9)
        faster += after.plan.added_seconds < 0.5 * before.plan.added_seconds
    assert faster >= 2


def test_what_cannot_be_offloaded_is_said() -> None:
    unknown = trainfit.Device("mine", "cuda", 1 << 34, 1e12, {"fp32": 1e13})
    with pytest.raises(OptionError, match="pcie_bytes_per_second"):
        trainfit.plan("gpt2-tiny", device=unknown, offload=True)
    with pytest.raises(OptionError, match="leave --solver out"):
        trainfit.plan("gpt2-tiny", device="h100", offload=True, solver="modules")
