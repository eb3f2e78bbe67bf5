"""The load of other processes: what the system counts, without what is our own."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_machine import FakeMachine

from trainfit.timing import load
from trainfit.timing.load import LoadMeter, busy_warning, is_busy, processor_times

needs_counters = pytest.mark.skipif(processor_times() is None, reason="the system has no /proc/stat")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.57, 0.9])
def test_the_share_of_others(share: float) -> None:
    with FakeMachine(share).meter().watching() as watch:
        pass
    assert watch.share == pytest.approx(share)
    assert is_busy(watch.share) is (share > 0.1)


def test_a_system_without_counters_is_not_known() -> None:
    meter = LoadMeter(lambda: None, sleep=lambda seconds: pytest.fail("waited for nothing"))
    with meter.watching() as watch:
        pass
    assert watch.share is None
    assert not is_busy(None) and not meter.is_quiet() and not meter.should_repeat(0.9)


def test_only_what_was_busy_is_repeated_when_it_is_quiet() -> None:
    machine = FakeMachine(0.0)
    assert machine.meter().should_repeat(0.5)
    assert not machine.meter().should_repeat(0.05)
    assert not machine.meter().should_repeat(None)
    machine.share = 0.6
    assert not machine.meter().should_repeat(0.5)


def test_a_short_block_is_looked_at_long_enough() -> None:
    waited: list[float] = []
    machine = FakeMachine(0.2)
    with LoadMeter(machine.read, waited.append).watching():
        pass
    assert len(waited) == 1 and 0.2 < waited[0] <= 0.3


def test_the_counters_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a /proc with two children of ours, one of them with a child, THEN all of them are our own."""
    ticks = os.sysconf("SC_CLK_TCK")
    (tmp_path / "stat").write_text(
        f"cpu  {ticks} {ticks} {ticks} {5 * ticks} {ticks} 0 0 {ticks} {ticks} 0\ncpu0\n"
    )
    for pid, parent, name, used in (
        (11, os.getpid(), "a child) 1 2", 3),
        (12, 11, "its child", 4),
        (13, 1, "a stranger", 50),
        (14, os.getpid(), "another", 2),
    ):
        (tmp_path / str(pid)).mkdir()
        columns = ["S", str(parent), *"0" * 9, str(used * ticks), "0", "0", "0", "20"]
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) {' '.join(columns)}\n")
    (tmp_path / "15").mkdir()  # has just ended
    monkeypatch.setattr(load, "_PROC", tmp_path)
    before = sum(os.times()[:4])
    found = processor_times()
    assert found is not None
    assert (found.total, found.busy) == (10.0, 4.0)
    assert 9.0 <= found.own - before < 9.5
    (tmp_path / "stat").write_text("nonsense")
    assert processor_times() is None


def _spin(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@needs_counters
def test_what_this_process_and_its_children_run_is_no_other_work() -> None:
    """Not by time: all that is asked is that our own seconds appear as our own."""
    before = processor_times()
    _spin(0.3)
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    child = multiprocessing.get_context("fork").Process(target=_spin, args=(60.0,))
    child.start()
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            after = processor_times()
            assert before is not None and after is not None
            if after.own - before.own >= 0.9:
                break
            time.sleep(0.05)
        assert after.own - before.own >= 0.9
        assert after.busy - before.busy >= after.own - before.own - 0.2
    finally:
        child.kill()
        child.join()


def test_the_warning() -> None:
    (text,) = busy_warning(0.57, "the step was measured", "it is too long.")
    assert (
        text
        == "other work took 57% of this machine's processors while the step was measured: it is too long."
    )
    assert busy_warning(0.05, "", "") == busy_warning(None, "", "") == ()
