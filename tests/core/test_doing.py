"""Whoever listens hears what is being done, in words; nobody has to."""

from __future__ import annotations

import io

from rich.console import Console

from trainfit.basics.doing import as_part_of, doing, heard_by, measuring, unheard
from trainfit.report.progress import Reporter, spinner


def test_nobody_has_to_listen() -> None:
    with as_part_of("something long"):
        doing("its first part")
    assert measuring() is None


def test_parts_are_heard_as_parts_of_their_stage() -> None:
    heard: list[str] = []
    with heard_by(heard.append):
        doing("reading")
        with as_part_of("measuring"), as_part_of("samples"):
            doing("the first")
            with unheard():
                doing("a detail")
        doing("solving")
    doing("not heard")
    assert heard == ["reading", "measuring", "measuring: samples", "measuring: samples: the first", "solving"]


def test_an_inner_call_without_a_listener_of_its_own_leaves_the_outer_one() -> None:
    heard: list[str] = []
    with heard_by(heard.append):
        with heard_by(None):
            doing("inside")
        with heard_by(None, lambda done, total, name: heard.append(f"{done}/{total} {name}")):
            doing("not heard: that listener wants parts only")
            tell = measuring()
            assert tell is not None
            tell(1, 2, "mm")
    assert heard == ["inside", "1/2 mm"]


def test_the_reporter_says_which_stage_has_come_how_far() -> None:
    shown: list[dict[str, object]] = []
    reporter = Reporter(lambda **what: shown.append(what))
    with heard_by(reporter, reporter.measuring):
        doing("measuring the step's operators")
        tell = measuring()
        assert tell is not None
        tell(3, 40, "aten.mm.default")
    assert shown[-1] == {
        "description": "measuring the step's operators: 3 of 40, aten.mm.default",
        "completed": 3,
        "total": 40,
        "ends": None,
    }


def test_nothing_is_written_where_nobody_watches() -> None:
    stream = io.StringIO()
    with spinner(Console(file=stream)) as reporter:
        reporter("a stage")
    assert stream.getvalue() == ""
