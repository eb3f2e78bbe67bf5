"""Plans on disk: JSON with a schema number and a content hash (`sealed_files.py`).

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
from trainfit.basics.sealed_files import FileKind, canonical, write_whole
from trainfit.errors import FileFormatError, OptionError
from trainfit.plans.plan import Plan
from trainfit.traces.settings import is_sound

FILE = FileKind("plan", schema=7, remedy="make it again with trainfit plan", older=(4, 5, 6))
_SINCE_5: dict[str, Any] = {"cluster": None, "parts": []}
"""What plans of schema 4 do not say: for which rank of how many processes they were made."""
_SINCE_6: dict[str, Any] = {"offloaded_bytes": 0, "beside": None}
"""What the regions of plans before schema 6 do not say: nothing was copied to the host."""
_SINCE_7: dict[str, Any] = {"host_inputs": []}
"""What the kinds of plans before schema 7 do not say: inputs were held."""


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write the plan, whole or not at all."""
    content = dataclasses.asdict(plan)
    head = FILE.head(canonical(content))
    write_whole(Path(path), (pretty({**head, "plan": content}) + "\n").encode())


def load_plan(path: str | Path) -> Plan:
    """Read a plan that `save_plan` wrote; anything else is one clear error."""
    content, schema = FILE.read_any(Path(path))
    if schema < FILE.schema and isinstance(content, dict):
        content = {**_SINCE_5, **content}
        for name, since in (("regions", _SINCE_6), ("kinds", _SINCE_7)):
            if isinstance(rows := content.get(name), list):
                content[name] = [{**since, **one} if isinstance(one, dict) else one for one in rows]
    try:
        plan = decode(Plan, content)
        check_plan(plan)
    except Malformed as error:
        raise FileFormatError(f"{path} is not a valid plan: {error}.") from None
    return plan


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


def check_plan(plan: Plan) -> None:
    """Check that the parts of a plan fit together."""
    if not is_sound(plan.settings):
        raise Malformed("expected counts from zero on, sizes above, and values as JSON text", "settings")
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
