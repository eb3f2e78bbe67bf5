"""`sweep`: every step of a grid, worked on by several processes, kept as it is done, written as one table."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from trainfit import __version__
from trainfit.api.stopwatch import Stopwatch
from trainfit.basics.doing import Measuring, Progress, doing, heard_by
from trainfit.basics.doing import measuring as listener
from trainfit.errors import OptionError
from trainfit.report.swept_data import SweepData
from trainfit.report.text_swept import row_label
from trainfit.sweeping.dispatching import Crew, Dispatcher
from trainfit.sweeping.grid_file import Grid, check_grid, read_grid
from trainfit.sweeping.grid_tasks import RowTask, tasks_of, varied
from trainfit.sweeping.local_crew import LocalCrew
from trainfit.sweeping.ray_crew import RayCrew, load_ray
from trainfit.sweeping.row_runner import Row
from trainfit.sweeping.state_file import StateFile
from trainfit.sweeping.swept_result import Sweep
from trainfit.sweeping.swept_table import check_table, columns_of, write_table

_MOST_JOBS = 10_000
STATE_ENDING = ".state.jsonl"


def sweep(
    grid: str | Path | Mapping[str, Any],
    *,
    output: str | Path | None = None,
    jobs: int | None = None,
    ray: bool | str = False,
    fresh: bool = False,
    progress: Progress | None = None,
    measuring: Measuring | None = None,
) -> Sweep:
    """Predict every step of a grid, and return all of them as one table.

    `grid` is a TOML file, or the same as a dictionary: `{"target": "gpt2", "batch": [1, 2, 4], "device":
    ["h100", "l40s"]}`. With `output` the table is written there, as CSV or Parquet, and rows are kept beside
    it as they are done: a second call continues where the first one stopped, unless `fresh`.

    The work is done by `jobs` processes of this machine, or with `ray` by those of a Ray cluster (`True`, or
    its address). One that dies loses nothing; a row over which three have died counts as failed. So does one
    whose step has a mistake; its `error` says which, and the others go on.
    """
    with heard_by(progress, measuring):
        table = None if output is None else Path(output)
        if table is not None:
            check_table(table)
        if isinstance(grid, Mapping):
            return _swept(check_grid(grid), "grid", table, jobs, ray, fresh)
        return _swept(read_grid(grid), str(grid), table, jobs, ray, fresh)


def _swept(
    grid: Grid, name: str, table: Path | None, jobs: int | None, ray: bool | str, fresh: bool
) -> Sweep:
    if jobs is not None and (type(jobs) is not int or not 1 <= jobs <= _MOST_JOBS):
        raise OptionError(f"--jobs must be a whole number from 1 to {_MOST_JOBS:,}, got {jobs!r}.")
    if not isinstance(ray, bool | str) or ray == "":
        raise OptionError(
            f"--ray-address is the address of a Ray cluster, as in 10.0.0.1:6379, got {ray!r:.80}."
        )
    if ray is not False:
        load_ray()  # or a state would be left behind that nothing has been added to
    watch, tasks = Stopwatch(), tasks_of(grid)
    with contextlib.ExitStack() as stack:
        state = None
        if table is not None:
            place = table.with_name(table.name + STATE_ENDING)
            state = stack.enter_context(StateFile(place, fresh=fresh))
        # What failed is tried again: the reason may be gone.
        kept = {} if state is None else {k: row for k, row in state.rows.items() if row.get("error") is None}
        rows = {task.number: kept[task.key] for task in tasks if task.key in kept}
        from_before = len(rows)
        _work(tasks, rows, state, varied(grid), jobs, ray)
        results = [rows[task.number] for task in tasks]
        names = columns_of(results)
        whole = tuple({name: row.get(name) for name in names} for row in results)
        if table is not None:
            doing("writing the table")
            write_table(whole, table)
    return Sweep(
        SweepData(
            grid=name,
            output=None if table is None else str(table),
            torch=metadata.version("torch"),
            trainfit=__version__,
            seconds=watch.seconds,
            count=len(tasks),
            kept=from_before,
            failed=sum(row["error"] is not None for row in whole),
            varied=varied(grid),
            results=whole,
        )
    )


def _work(
    tasks: list[RowTask],
    rows: dict[int, Row],
    state: StateFile | None,
    names: tuple[str, ...],
    jobs: int | None,
    ray: bool | str,
) -> None:
    """Do the rows that are not there yet; each is kept as soon as it is done."""
    todo = [task for task in tasks if task.number not in rows]
    if not todo:
        return
    before = len(rows)
    doing(f"{len(todo)} rows{f', {before} are done already' if before else ''}")
    tell = listener()

    def finished(task: RowTask, row: Row) -> None:
        if state is not None:
            state.add(task.key, row)
        rows[task.number] = row
        if tell is not None:
            tell(len(rows) - before, len(todo), row_label(row, names))

    crew: Crew
    if ray is False:
        crew, size = LocalCrew(), len(os.sched_getaffinity(0))
    else:
        crew = RayCrew(None if ray is True else ray)
        size = crew.size
    try:
        Dispatcher(crew, todo, jobs or size, finished).run()
    except KeyboardInterrupt:
        said = f"{len(rows)} of {len(tasks)} rows are done"
        if state is not None:
            said += f" and kept in {state.path}: the same command continues there"
        raise KeyboardInterrupt(f"{said}.") from None
