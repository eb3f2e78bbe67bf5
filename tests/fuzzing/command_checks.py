"""What must hold for every command line: a known exit code, one clear message, the JSON that is asked for."""

from __future__ import annotations

import json

from option_values import CommandLine
from workbench import Outcome, workbench

EXIT_CODES = (0, 2, 3, 4)


def check_command_line(line: CommandLine) -> None:
    """A command ends with a code of the contract, says something, and writes the JSON that was asked for."""
    bench = workbench()
    (bench.folder / "result.json").unlink(missing_ok=True)
    outcome = bench.run(line.words, real=line.real)
    if outcome.error is not None:
        raise outcome.error
    assert outcome.code in EXIT_CODES, f"exit code {outcome.code!r}"
    if outcome.code == 2:
        _check_one_message(outcome)
    elif line.json is not None and line.words[0] != "devices":
        _check_json(line.json, outcome)
    if outcome.code == 0 and line.json != "-":
        assert outcome.out.strip(), "nothing was printed"


def _check_one_message(outcome: Outcome) -> None:
    lines = outcome.err.splitlines()
    messages = [line for line in lines if line.startswith(("error: ", "╭─ Error"))]
    assert len(messages) == 1, f"{len(messages)} messages:\n{outcome.err}"
    own = "the user's own mistake" in outcome.err or "SystemExit" in outcome.err
    assert own or "Traceback" not in outcome.err, outcome.err


def _check_json(name: str, outcome: Outcome) -> None:
    """The result is an object, or one for each step of a list; what cannot be written would be refused."""
    text = outcome.out if name == "-" else None
    if text is None and not name.startswith("/dev/"):
        text = (workbench().folder / name).read_text(encoding="utf-8")
    if text is not None:
        document = json.loads(text, parse_constant=lambda constant: 1 / 0)
        for one in document if isinstance(document, list) else [document]:
            named = one.get("old", one)
            about = [named[key] for key in ("target", "device", "grid") if named.get(key) is not None]
            assert one["schema"] and about
