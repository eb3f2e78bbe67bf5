"""Plans on disk: JSON with a schema number and a content hash (`sealed_files.py`).

There are two kinds, and a file says which it is: plans that `apply` carries out itself, and those that it
hands to torch.compile.

People look into plans, so records have their fields' names, and ops one line each. Reading checks the type of
every value, the hash and that the parts fit together; whatever is wrong, the reader raises one
`FileFormatError`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from trainfit.basics.decoding import Malformed, decode
from trainfit.basics.sealed_files import FileKind, canonical, read_json, write_whole
from trainfit.errors import FileFormatError, OptionError
from trainfit.plans.compiled_plan import CompiledPlan
from trainfit.plans.plan import Plan
from trainfit.traces.settings import is_sound

FILE = FileKind("plan", schema=7, remedy="make it again with trainfit plan", older=(4, 5, 6))
COMPILED = FileKind("compiled-plan", schema=1, remedy="make it again with trainfit plan --compile")
_SINCE_5: dict[str, Any] = {"cluster": None, "parts": []}
"""What plans of schema 4 do not say: for which rank of how many processes they were made."""
_SINCE_6: dict[str, Any] = {"offloaded_bytes": 0, "beside": None}
"""What the regions of plans before schema 6 do not say: nothing was copied to the host."""
_SINCE_7: dict[str, Any] = {"host_inputs": []}
"""What the kinds of plans before schema 7 do not say: inputs were held."""
_SETTINGS_WANTED = "expected counts from zero on, sizes above, and values as JSON text"


def save_plan(plan: Plan | CompiledPlan, path: str | Path) -> None:
    """Write the plan, whole or not at all."""
    content = plan_as_data(plan)
    kind = COMPILED if isinstance(plan, CompiledPlan) else FILE
    head = kind.head(canonical(content))
    write_whole(Path(path), (pretty({**head, kind.name: content}) + "\n").encode())


def plan_as_data(plan: Plan | CompiledPlan) -> dict[str, Any]:
    """Return a plan as JSON has it."""
    return dataclasses.asdict(plan)


def plan_of_data(content: Any) -> Plan:
    """Return the plan that `plan_as_data` was given; `Malformed` if it is anything else."""
    plan = decode(Plan, content)
    check_plan(plan)
    return plan


def load_plan(path: str | Path) -> Plan | CompiledPlan:
    """Read a plan that `save_plan` wrote, of whichever kind; anything else is one clear error."""
    document = read_json(Path(path))
    if isinstance(document, dict) and document.get("format") == COMPILED.format:
        return _load_compiled_plan(Path(path))
    return _load_eager_plan(Path(path))


def load_eager_plan(path: str | Path) -> Plan:
    """Read a plan that `apply` carries out itself."""
    plan = load_plan(path)
    if isinstance(plan, CompiledPlan):
        raise FileFormatError(
            f"{path} is a plan for torch.compile (trainfit plan --compile), which only trainfit.apply and "
            "trainfit verify take; make one with trainfit plan."
        )
    return plan


def _load_compiled_plan(path: Path) -> CompiledPlan:
    try:
        plan = decode(CompiledPlan, COMPILED.read(path))
        check_compiled_plan(plan)
    except Malformed as error:
        raise FileFormatError(f"{path} is not a valid plan: {error}.") from None
    return plan


def _load_eager_plan(path: Path) -> Plan:
    content, schema = FILE.read_any(path)
    if schema < FILE.schema and isinstance(content, dict):
        content = {**_SINCE_5, **content}
        for name, since in (("regions", _SINCE_6), ("kinds", _SINCE_7)):
            if isinstance(rows := content.get(name), list):
                content[name] = [{**since, **one} if isinstance(one, dict) else one for one in rows]
    try:
        return plan_of_data(content)
    except Malformed as error:
        raise FileFormatError(f"{path} is not a valid plan: {error}.") from None


def pretty(value: Any, indent: int = 0) -> str:
    """Write JSON so that a person can read it: what is short stays on one line."""
    short = json.dumps(value, ensure_ascii=True)
    if len(short) + indent <= 110 or not isinstance(value, dict | list | tuple):
        return short
    inner = " " * (indent + 1)
    if isinstance(value, dict):
        rows = [f"{json.dumps(key)}: {pretty(item, indent + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(inner + row for row in rows) + "\n" + " " * indent + "}"
    rows = [pretty(item, indent + 1) for item in value]
    return "[\n" + ",\n".join(inner + row for row in rows) + "\n" + " " * indent + "]"


def check_compiled_plan(plan: CompiledPlan) -> None:
    """Check that the parts of a plan for torch.compile fit together."""
    if not is_sound(plan.settings):
        raise Malformed(_SETTINGS_WANTED, "settings")
    for call in plan.calls:
        if not 0 <= call < len(plan.graphs):
            raise Malformed(f"a step calls graph {call}, of {len(plan.graphs)}", "calls")
    for number, graph in enumerate(plan.graphs):
        if len(set(graph.kept)) != len(graph.kept):
            raise Malformed("a value is kept twice", f"graphs[{number}].kept")
        if any(name.number < 0 or name.result < 0 for name in graph.kept):
            raise Malformed("calls and results are counted from 0", f"graphs[{number}].kept")
    sizes = [plan.budget_bytes, plan.peak_bytes, plan.memory_bytes, plan.baseline_peak_bytes]
    sizes += [s for g in plan.graphs for s in (g.kept_bytes, g.forward_peak_bytes, g.backward_peak_bytes)]
    if min(sizes) < 0:
        raise Malformed("sizes in bytes are not negative")


def check_plan(plan: Plan) -> None:
    """Check that the parts of a plan fit together."""
    if not is_sound(plan.settings):
        raise Malformed(_SETTINGS_WANTED, "settings")
    if plan.cluster is not None:
        try:
            plan.cluster.check()
        except OptionError as error:
            raise Malformed(str(error).rstrip("."), "cluster") from None
    seen: set[tuple[str, int]] = set()
    for region in plan.regions:
        if not 0 <= region.kind < len(plan.kinds):
            raise Malformed(f"region {region.module} is of kind {region.kind}, of {len(plan.kinds)}")
        if region.call < 0 or (region.module, region.call) in seen:
            raise Malformed(f"call {region.call} of {region.module} is there twice or negative")
        seen.add((region.module, region.call))
        if region.whole and (region.kept_bytes or region.continues):
            raise Malformed(
                f"region {region.module} is recomputed as a whole, but keeps results or continues another"
            )
        if region.whole and plan.kind_of(region).host_inputs:
            raise Malformed(
                f"region {region.module} is recomputed by torch alone, but has inputs on the host"
            )
    for kind in plan.kinds:
        if any(not 0 <= place.op < len(kind.ops) or place.argument < 0 for place in kind.host_inputs):
            raise Malformed("an input on the host is read by an op that its region does not have")
