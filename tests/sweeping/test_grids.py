"""What a grid says: its rows, its keys, and one message for every mistake in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from trainfit.errors import FileFormatError, OptionError, TrainfitError
from trainfit.sweeping.dispatching import Dispatcher, WorkerEvent
from trainfit.sweeping.grid_file import check_grid, read_grid
from trainfit.sweeping.grid_tasks import RowTask, tasks_of, varied
from trainfit.sweeping.state_file import StateFile
from trainfit.sweeping.swept_table import check_table, columns_of

SMALL = {"target": "gpt2-tiny", "device": "h100"}


def test_the_rows_of_a_grid_share_captures_with_their_neighbours() -> None:
    grid = check_grid({
        **SMALL,
        "device": ["h100", "l4"],
        "budget": ["none", "80%"],
        "batch": [1, 2],
        "set": {"layers": [1, 2]},
    })  # fmt: skip
    tasks = tasks_of(grid)
    assert len(tasks) == grid.rows == 16
    assert [task.number for task in tasks] == list(range(16))
    assert tasks[0].values == {
        **SMALL,
        "batch": 1,
        "set.layers": 1,
        "device": "h100",
        "budget": "none",
    }
    captures = [task.capture for task in tasks]
    assert [len(set(captures[first : first + 4])) for first in (0, 4, 8, 12)] == [1, 1, 1, 1]
    assert len(set(captures)) == 4
    assert len({task.key for task in tasks}) == 16
    assert varied(grid) == ("batch", "device", "budget", "set.layers")


def test_a_key_changes_with_the_files_that_a_row_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "train.py"
    grid = check_grid({"target": f"{file}:build", "device": "h100"})
    file.write_text("one")
    first, again = tasks_of(grid)[0].key, tasks_of(grid)[0].key
    file.write_text("two")
    assert first == again != tasks_of(grid)[0].key
    before = tasks_of(grid)[0].key
    monkeypatch.setattr("trainfit.sweeping.grid_tasks._versions", lambda: {"torch": "3.0"})
    assert tasks_of(grid)[0].key != before


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "has no target"),
        ({"target": "gpt2"}, "has no device; add one"),
        ({**SMALL, "batchs": 1}, "there is no key 'batchs'. Did you mean batch?"),
        ({**SMALL, "models": ["gpt2"]}, "there is no key 'models'. Did you mean target?"),
        ({**SMALL, "colour": 1}, "there is no key 'colour'. The keys are target"),
        ({**SMALL, "batch": []}, "batch is an empty list"),
        ({**SMALL, "batch": [1, 1]}, "batch has 1 twice"),
        ({**SMALL, "batch": 0}, "batch: --batch must be a whole number from 1"),
        ({**SMALL, "batch": [1, "two"]}, "batch: --batch must be a whole number"),
        ({**SMALL, "seq": 1.5}, "seq: --seq must be a whole number"),
        ({**SMALL, "dtype": "fp9"}, "dtype: --dtype must be one of fp32"),
        ({**SMALL, "device": ["h100", "h1000"]}, "device: there is no device 'h1000'"),
        ({**SMALL, "device": 4}, "device: expected text, got 4"),
        ({**SMALL, "budget": "much"}, "budget: 'much' is not a size"),
        ({**SMALL, "budget": -1}, "budget: expected a size such as"),
        ({**SMALL, "budget": True}, "budget: expected a size such as"),
        ({**SMALL, "budget": "101%"}, "budget: '101%' is more than the whole device"),
        ({**SMALL, "mesh": "dp8"}, "mesh: --mesh 'dp8'"),
        ({**SMALL, "rank": "first"}, "rank: --rank 'first' is neither"),
        ({**SMALL, "network": "fast"}, "network: --network 'fast' is not a speed"),
        ({**SMALL, "allocator": "own"}, "allocator: --allocator own"),
        ({**SMALL, "plan_seconds": 0}, "plan_seconds: expected seconds above zero"),
        ({**SMALL, "target": {"a": 1}}, "target: expected text"),
        ({**SMALL, "set": 3}, "set is a table"),
        ({**SMALL, "set": {"layers": {"a": 1}}}, "set.layers: expected a number"),
        ({**SMALL, "set": {"rate": [float("nan")]}}, "set.rate: expected a number"),
        (
            {**SMALL, "batch": list(range(1, 400)), "seq": list(range(2, 300))},
            "has 118,902 rows, more than 100,000: 399 batch × 298 seq",
        ),
    ],
)
def test_a_mistake_in_a_grid_names_its_key(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError) as raised:
        check_grid(given, "grid.toml")
    assert said in str(raised.value) and str(raised.value).startswith("grid.toml")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a = ", "is not TOML"),
        (b"\xff\xfe", "it is not text"),
        (None, "No such file"),
        (b"x=" + b"[" * 5000, "TOML"),
    ],
)
def test_a_file_that_is_no_grid(content: bytes | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(OptionError, match=said):
        read_grid(file)


def test_a_table_has_the_usual_columns_first() -> None:
    names = columns_of([{"target": "a", "set.layers": 1, "rank": 0, "error": None}])
    assert names[:3] == ["target", "batch", "seq"] and names[9:12] == ["set.layers", "rank", "device_name"]
    assert names[-1] == "error"
    with pytest.raises(OptionError, match=r"ends in .csv or .parquet"):
        check_table(Path("table.txt"))


class PretendedCrew:
    """Workers that say what a list says: `row`, or a death."""

    def __init__(self, deaths: dict[int, int], *, starts: bool = True) -> None:
        self.deaths = dict(deaths)
        self.starts = starts
        self.given: list[tuple[int, int]] = []
        self.started = 0
        self.ended: list[int] = []
        self.closed = False
        self._events: list[WorkerEvent] = []

    def start(self, worker: int) -> None:
        self.started += 1
        kind = (
            WorkerEvent(worker, "ready")
            if self.starts
            else WorkerEvent(worker, "died", reason="has no torch")
        )
        self._events.append(kind)

    def give(self, worker: int, task: RowTask) -> None:
        self.given.append((worker, task.number))
        if self.deaths.get(task.number, 0):
            self.deaths[task.number] -= 1
            self._events.append(WorkerEvent(worker, "died", reason="was ended by SIGKILL"))
        else:
            self._events.append(WorkerEvent(worker, "row", {"number": task.number, "error": None}))

    def wait(self) -> Sequence[WorkerEvent]:
        assert self._events, "nobody works, and not all rows are done"
        return [self._events.pop(0)]

    def end(self, worker: int) -> None:
        self.ended.append(worker)

    def close(self) -> None:
        self.closed = True


def tasks_by_capture(*batches: int) -> list[RowTask]:
    return [RowTask(number, {"target": "a", "batch": batch}) for number, batch in enumerate(batches)]


def test_the_row_of_a_worker_that_dies_is_done_by_another() -> None:
    crew, rows = PretendedCrew({1: 2, 2: 3}), {}
    tasks = tasks_by_capture(1, 2, 3, 4)
    Dispatcher(crew, tasks, 2, lambda task, row: rows.update({task.number: row})).run()
    assert sorted(rows) == [0, 1, 2, 3] and crew.closed
    assert rows[1]["error"] is None  # at its third attempt
    assert rows[2]["error"] == "3 workers died over this row, the last one because it was ended by SIGKILL"
    assert [number for _, number in crew.given].count(1) == [number for _, number in crew.given].count(2) == 3


def test_workers_that_never_start_are_one_message() -> None:
    crew = PretendedCrew({}, starts=False)
    with pytest.raises(TrainfitError, match="no worker can start: the last one has no torch"):
        Dispatcher(crew, tasks_by_capture(1, 2), 2, lambda task, row: None).run()
    assert crew.closed and crew.started < 10


def test_rows_that_share_a_capture_go_to_one_worker() -> None:
    crew = PretendedCrew({})
    Dispatcher(crew, tasks_by_capture(1, 1, 1, 2, 2, 2), 2, lambda task, row: None).run()
    by_worker = {worker: [n for w, n in crew.given if w == worker] for worker in (0, 1)}
    assert sorted(by_worker.values()) == [[0, 1, 2], [3, 4, 5]]


def test_a_capture_is_divided_when_nothing_else_is_left() -> None:
    crew = PretendedCrew({})
    Dispatcher(crew, tasks_by_capture(1, 1, 1, 1), 2, lambda task, row: None).run()
    assert {worker for worker, _ in crew.given} == {0, 1}


@pytest.mark.parametrize(
    ("targets", "replaced"),
    [
        (["gpt2", "llama", "hf:a"], 0),
        (["a.py:build", "a.py:build"], 0),
        (["a.py:build", "b.py:build"], 1),
        (["gpt2", "a:build", "gpt2-xl"], 2),
    ],
)
def test_code_of_one_target_does_not_meet_that_of_another(targets: list[str], replaced: int) -> None:
    crew, rows = PretendedCrew({}), {}
    tasks = [RowTask(number, {"target": target}) for number, target in enumerate(targets)]
    Dispatcher(crew, tasks, 1, lambda task, row: rows.update({task.number: row})).run()
    assert len(crew.ended) == replaced == crew.started - 1
    assert sorted(rows) == list(range(len(targets)))


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "table.csv.state.jsonl"
    with StateFile(file) as first:
        assert first.rows == {}
        first.add("a", {"batch": 1})
        first.add("b", {"batch": 2})
    yield file


def test_finished_rows_are_found_again(state: Path) -> None:
    with StateFile(state) as again:
        assert again.rows == {"a": {"batch": 1}, "b": {"batch": 2}}


@pytest.mark.parametrize("cut", [1, 5, 18])
def test_a_line_that_was_cut_off_is_done_again(state: Path, cut: int) -> None:
    state.write_bytes(state.read_bytes()[:-cut])
    with StateFile(state) as again:
        # Only the end of the line is missing if one byte is: the row is whole.
        assert again.rows == {"a": {"batch": 1}, **({"b": {"batch": 2}} if cut == 1 else {})}
        again.add("c", {"batch": 3})
    with StateFile(state) as last:
        assert last.rows["a"] == {"batch": 1} and last.rows["c"] == {"batch": 3}


def test_what_is_no_state_is_not_touched(state: Path, tmp_path: Path) -> None:
    other = tmp_path / "mine.jsonl"
    for content in (b'{"a": 1}\n', b"my notes\n", b'{"format":"trainfit-sweep","schema":99}\n'):
        other.write_bytes(content)
        for fresh in (False, True):
            with pytest.raises(FileFormatError, match="is not the state of a sweep"):
                StateFile(other, fresh=fresh)
        assert other.read_bytes() == content
    with StateFile(state), pytest.raises(FileFormatError, match="another sweep writes to"):
        StateFile(state)
    with StateFile(state, fresh=True) as emptied:
        assert emptied.rows == {}
