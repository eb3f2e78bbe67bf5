"""A strict reader of Chrome's Trace Event Format: refuses what a viewer would drop or draw wrongly."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

Event = dict[str, Any]
Track = tuple[int, int]

REQUIRED = {
    "M": {"name", "ph", "pid", "args"},
    "X": {"name", "ph", "ts", "dur", "pid", "tid", "cat"},
    "s": {"name", "ph", "ts", "pid", "tid", "cat", "id"},
    "f": {"name", "ph", "ts", "pid", "tid", "cat", "id", "bp"},
    "C": {"name", "ph", "ts", "pid", "args"},
    "i": {"name", "ph", "ts", "pid", "tid", "s"},
}
METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


class CheckedTrace:
    """The events of a trace that keeps every rule."""

    def __init__(self, document: Any) -> None:
        assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
        assert document["displayTimeUnit"] in ("ms", "ns")
        self.events: list[Event] = document["traceEvents"]
        self.names: dict[Track, str] = {}
        self.processes: dict[int, str] = {}
        self.slices: defaultdict[Track, list[Event]] = defaultdict(list)
        self.arrows: list[tuple[Event, Event]] = []
        """The slices that each arrow leads from and to."""
        self.counters: defaultdict[str, list[Event]] = defaultdict(list)
        self.marks: list[Event] = []
        for event in self.events:
            self._check_event(event)
        self._check_tracks()
        for slices in self.slices.values():
            check_nesting(slices)
        self._bind_arrows()
        self._check_counters()

    def track(self, name: str) -> list[Event]:
        """Return the slices of the one track with this name."""
        (place,) = (place for place, found in self.names.items() if found == name)
        return self.slices[place]

    def _check_event(self, event: Event) -> None:
        kind = event["ph"]
        missing = REQUIRED[kind] - set(event)
        assert not missing, f"{event} lacks {missing}"
        assert isinstance(event["name"], str) and event["name"]
        assert type(event["pid"]) is int and type(event.get("tid", 0)) is int
        for key in ("ts", "dur"):
            if key in event:
                assert isinstance(event[key], int | float) and math.isfinite(event[key]) and event[key] >= 0
        assert isinstance(event.get("args", {}), dict)
        if kind == "M":
            assert event["name"] in METADATA
            self._name(event)
        elif kind == "X":
            self.slices[event["pid"], event["tid"]].append(event)
        elif kind == "C":
            assert event["args"] and all(type(value) is int for value in event["args"].values())
            self.counters[event["name"]].append(event)
        elif kind == "i":
            assert event["s"] in ("g", "p", "t")
            self.marks.append(event)
        elif kind == "f":
            assert event["bp"] == "e"

    def _name(self, event: Event) -> None:
        if event["name"] == "process_name":
            assert event["pid"] not in self.processes
            self.processes[event["pid"]] = event["args"]["name"]
        elif event["name"] == "thread_name":
            assert (event["pid"], event["tid"]) not in self.names
            self.names[event["pid"], event["tid"]] = event["args"]["name"]
        else:
            assert type(event["args"]["sort_index"]) is int

    def _check_tracks(self) -> None:
        assert set(self.slices) <= set(self.names), "a track without a name"
        assert {event["pid"] for event in self.events} == set(self.processes)
        assert len(set(self.names.values())) == len(self.names)

    def _bind_arrows(self) -> None:
        """Every arrow has one begin and one end, in this order, each inside of a slice of its track."""
        ends: defaultdict[Any, list[Event]] = defaultdict(list)
        for event in self.events:
            if event["ph"] in "sf":
                ends[event["id"]].append(event)
        for pair in ends.values():
            assert [event["ph"] for event in pair] == ["s", "f"]
            start, end = pair
            assert (start["name"], start["cat"]) == (end["name"], end["cat"])
            assert start["ts"] <= end["ts"]
            self.arrows.append((self._around(start), self._around(end)))

    def _around(self, event: Event) -> Event:
        """Return the innermost slice at an event; where one ends and another begins, it is the second."""
        found = None
        for one in self._sorted(event["pid"], event["tid"]):
            if one["ts"] > event["ts"]:
                break
            if event["ts"] <= end_of(one):
                found = one
        assert found is not None, f"{event} is in no slice"
        return found

    def _sorted(self, pid: int, tid: int) -> list[Event]:
        return sorted(self.slices[pid, tid], key=lambda one: (one["ts"], -one["dur"]))

    def _check_counters(self) -> None:
        for name, events in self.counters.items():
            times = [event["ts"] for event in events]
            assert times == sorted(times), f"{name} goes back in time"
            assert len({(event["pid"], *event["args"]) for event in events}) == 1


def end_of(one: Event) -> float:
    return round(float(one["ts"] + one["dur"]), 3)


def check_nesting(slices: list[Event]) -> None:
    """Slices of one track follow each other or enclose each other, and never overlap."""
    open_ends: list[float] = []
    for one in sorted(slices, key=lambda one: (one["ts"], -one["dur"])):
        while open_ends and open_ends[-1] <= one["ts"]:
            open_ends.pop()
        assert not open_ends or end_of(one) <= open_ends[-1], f"{one} overlaps"
        open_ends.append(end_of(one))
