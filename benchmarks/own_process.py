"""Benchmarks run each case in a process of its own: a crash, or what it leaves behind, is its alone."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

_RESULT = "result: "


class CaseFailed(Exception):
    """A case crashed or took too long; the message says which."""


def run_one(script: str, *arguments: str, seconds: float) -> Any:
    """Run `script --run-one ARGUMENTS` and return what it hands to `report`."""
    command = [sys.executable, script, "--run-one", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise CaseFailed(f"not finished after {seconds:.0f} s") from None
    for line in done.stdout.splitlines():
        if line.startswith(_RESULT):
            return json.loads(line.removeprefix(_RESULT))
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    raise CaseFailed(f"exit code {done.returncode}: {last[:300]}")


def report(result: Any) -> None:
    """Hand the result of a case to the process that has started this one."""
    print(_RESULT + json.dumps(result), flush=True)
