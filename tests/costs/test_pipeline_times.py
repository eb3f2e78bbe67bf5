"""Stages of a pipeline against the textbook: one forward, one backward, and the bubble that they leave."""

from __future__ import annotations

import json

import pytest

from trainfit.costs.pipeline_times import is_pipeline, pipeline_times
from trainfit.costs.schedule import Schedule, schedule
from trainfit.costs.summary import summarise
from trainfit.costs.table import CostTable, Host, OpCost
from trainfit.devices.device_table import Device
from trainfit.traces.ranks import Cluster, Collective
from trainfit.traces.trace import Op, Signature, Trace

DEVICE = Device("tiny", "cuda", 1 << 30, 1e9, {"fp32": 1e12}, sm_count=4)
HOST = Host(False, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class Stage:
    """Writes down what one stage does."""

    def __init__(self, rank: int, stages: int, link: float) -> None:
        self.rank, self.stages, self.link = rank, stages, link
        self.signatures: list[Signature] = []
        self.ops: list[Op] = []
        self.costs: list[OpCost] = []

    def exchange(self, kind: str, peer: int) -> int | None:
        """Send to another stage, or receive; what is beyond the ends of the pipeline does not exist."""
        if not 0 <= peer < self.stages:
            return None
        before = tuple(n for n, op in enumerate(self.ops) if op.queue == "compute")[-1:]
        collective = Collective(kind, self.stages, "pp", 8, ((0, self.stages - 1, 1),))
        arguments = json.dumps([[[{"tensor": 0}], {"group": "pp"}, peer, 0], {}])
        self._add(
            f"c10d.{kind}", collective, arguments, "group pp", before if kind == "send" else (), self.link
        )
        return len(self.ops) - 1

    def compute(self, seconds: float, after: int | None) -> None:
        """Run a kernel that needs what was received."""
        self._add("aten.mm", None, "[[],{}]", "compute", () if after is None else (after,), seconds)

    def _add(
        self,
        name: str,
        collective: Collective | None,
        arguments: str,
        queue: str,
        waits: tuple[int, ...],
        seconds: float,
    ) -> None:
        number = len(self.ops)
        self.signatures.append(Signature(name, (), (), arguments, False, False, False, collective))
        self.ops.append(Op(number, "forward", -1, -1, False, -1, (), (), (), queue, waits))
        self.costs.append(OpCost(seconds, "formula"))

    def forward(self, seconds: float) -> None:
        self.compute(seconds, self.exchange("recv", self.rank - 1))
        self.exchange("send", self.rank + 1)

    def backward(self, seconds: float) -> None:
        self.compute(seconds, self.exchange("recv", self.rank + 1))
        self.exchange("send", self.rank - 1)

    def schedule(self) -> Schedule:
        trace = Trace("t", "cuda", "2", tuple(self.signatures), tuple(self.ops), (), (), (), (), (), (), 0)
        object.__setattr__(trace, "cluster", Cluster(self.stages, self.rank, mesh=(("pp", self.stages),)))
        return schedule(trace, CostTable(DEVICE, HOST, tuple(self.costs), uncertainty=0.1))


def one_forward_one_backward(
    stages: int, batches: int, forward: float, backward: float, link: float = 0.0
) -> list[Schedule]:
    found = []
    for rank in range(stages):
        stage, first = Stage(rank, stages, link), min(stages - rank - 1, batches)
        for _ in range(first):
            stage.forward(forward)
        for _ in range(batches - first):
            stage.forward(forward)
            stage.backward(backward)
        for _ in range(first):
            stage.backward(backward)
        found.append(stage.schedule())
    return found


@pytest.mark.parametrize(("stages", "batches"), [(2, 2), (4, 4), (4, 8), (8, 32)])
def test_the_bubble_of_equal_stages_is_that_of_the_textbook(stages: int, batches: int) -> None:
    """(p - 1) of (m + p - 1) slots are empty, where a slot is one forward and one backward."""
    found = pipeline_times(one_forward_one_backward(stages, batches, 1.0, 2.0))
    assert found.step_seconds == pytest.approx(3.0 * (batches + stages - 1))
    assert found.bubble_share == pytest.approx((stages - 1) / (batches + stages - 1))
    assert found.bubble_seconds(0) == pytest.approx(3.0 * (stages - 1))


def test_two_stages_and_two_batches_by_hand_with_a_slow_link() -> None:
    """F0 at 0-1 arrives at 1.5; its backward is back at 1.5 + 1 + 2 + 0.5 = 5.

    Stage 0: F0 0-1, F1 1-2, B0 5-7. Stage 1: F0 1.5-2.5, B0 2.5-4.5, F1 4.5-5.5, B1 5.5-7.5; back at 8.
    """
    found = pipeline_times(one_forward_one_backward(2, 2, 1.0, 2.0, link=0.5))
    assert found.step_seconds == pytest.approx(10.0)


def test_one_slow_stage_decides() -> None:
    """With many batches the slowest stage works without a pause but for filling and draining."""
    quick = one_forward_one_backward(2, 32, 1.0, 2.0)
    slow = one_forward_one_backward(2, 32, 2.0, 4.0)
    found = pipeline_times([quick[0], slow[1]])
    assert found.step_seconds == pytest.approx(32 * 6.0 + 3.0)


def test_more_batches_never_leave_a_larger_share_empty_and_links_never_help() -> None:
    shares = [pipeline_times(one_forward_one_backward(4, m, 1.0, 2.0)).bubble_share for m in (4, 8, 16, 32)]
    assert shares == sorted(shares, reverse=True)
    times = [
        pipeline_times(one_forward_one_backward(4, 8, 1.0, 2.0, link)).step_seconds
        for link in (0, 0.1, 0.5, 2)
    ]
    assert times == sorted(times)


def test_the_summary_has_the_time_of_all_stages() -> None:
    stages = one_forward_one_backward(4, 4, 1.0, 2.0)
    assert all(is_pipeline(stage.trace) for stage in stages)
    time = summarise(stages[1], pipeline_times(stages), 1)
    assert time.step_seconds == pytest.approx(21.0)
    assert time.bubble_seconds == pytest.approx(9.0)
    assert time.bubble_share == pytest.approx(3 / 7)


def test_what_comes_from_a_rank_that_is_not_there_is_taken_to_have_come() -> None:
    stages = one_forward_one_backward(4, 4, 1.0, 2.0)
    assert pipeline_times(stages[1:2]).step_seconds == pytest.approx(12.0)
