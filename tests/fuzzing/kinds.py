"""The kinds of inputs, and how many of one are tried: `run` is the fuzzer."""

from __future__ import annotations

import contextlib
import gc
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import hypothesis
import torch
from command_checks import check_command_line
from damaged_files import damaged_files
from file_checks import check_file, valid_files
from generated_results import pairs
from hypothesis import HealthCheck, Phase, strategies
from hypothesis.errors import UnsatisfiedAssumption
from option_values import command_lines
from result_checks import check_pair
from step_checks import check_step, planned_steps
from workbench import workbench

_BATCH = 50
"""Inputs that share a seed; the first failure ends a batch, and the next one goes on."""


@dataclass(frozen=True)
class Kind:
    """What is drawn, what must hold for it, and its share of all inputs."""

    share: float
    inputs: Callable[[], strategies.SearchStrategy[Any]]
    check: Callable[[Any], None]


def _files_of(kind: str) -> Callable[[], strategies.SearchStrategy[Any]]:
    return lambda: damaged_files(kind, valid_files()[kind])


KINDS: dict[str, Kind] = {
    "command lines": Kind(0.5, command_lines, check_command_line),
    "trace files": Kind(0.06, _files_of("trace"), check_file),
    "plan files": Kind(0.08, _files_of("plan"), check_file),
    "device files": Kind(0.06, _files_of("device"), check_file),
    "graph files": Kind(0.06, _files_of("graph"), check_file),
    "cost caches": Kind(0.04, _files_of("cache"), check_file),
    "hf: configs": Kind(0.02, _files_of("config"), check_file),
    "results to compare": Kind(0.15, pairs, check_pair),
    "training steps": Kind(0.03, planned_steps, check_step),
}


@dataclass
class Tally:
    """How many inputs were tried, what failed, how long it took."""

    tried: int = 0
    left_out: int = 0
    """Steps that torch itself refuses to run."""
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


def run(name: str, inputs: int, seed: int = 0, seconds_limit: float = float("inf")) -> Tally:
    """Try so many inputs of a kind; the same seed gives the same inputs."""
    tally, begin = Tally(), time.perf_counter()
    with _prepared():
        while tally.tried < inputs and tally.seconds < seconds_limit:
            before = tally.tried
            wanted = min(_BATCH, inputs - before)
            _run_batch(KINDS[name], wanted, hash_of(seed, before), tally)
            tally.seconds = time.perf_counter() - begin
            if tally.tried == before:
                break
    return tally


def hash_of(seed: int, batch: int) -> int:
    """Return a seed for a batch that no other batch has."""
    return seed * 1_000_003 + batch


def _run_batch(kind: Kind, inputs: int, seed: int, tally: Tally) -> None:
    failed = False

    def one_input(case: Any) -> None:
        nonlocal failed
        try:
            kind.check(case)
        except UnsatisfiedAssumption:
            tally.left_out += not failed
            raise
        except BaseException:
            tally.tried += not failed  # what comes after it are attempts to make it smaller
            failed = True
            raise
        tally.tried += not failed

    settings = hypothesis.settings(
        max_examples=inputs,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    try:
        hypothesis.seed(seed)(settings(hypothesis.given(case=kind.inputs())(one_input)))()
    except Exception as error:
        tally.failures.append("".join(traceback.format_exception(error)))


@contextlib.contextmanager
def _prepared() -> Iterator[None]:
    """One thread, and little for the garbage collector to look through, which a capture calls."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    bench = workbench()
    freezes = gc.get_freeze_count() == 0
    if freezes:
        gc.collect()
        gc.freeze()
    try:
        with mock.patch.dict(os.environ, TRAINFIT_CACHE=str(bench.folder / "cache")):
            yield
    finally:
        if freezes:
            gc.unfreeze()
        torch.set_num_threads(threads)
