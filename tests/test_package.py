"""What others see of the project besides its code: metadata, versions, citation, workflow, templates."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import trainfit

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_the_citation_is_of_this_version() -> None:
    citation = read("CITATION.cff")
    assert citation["version"] == trainfit.__version__ == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


def test_versions_are_stated_where_people_look() -> None:
    torch = next(text for text in PROJECT["dependencies"] if text.startswith("torch"))
    assert torch in CONSTRAINTS  # the version that is tested
    table = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8").split("## Versions")[1].split("##")[0]
    assert torch.partition("==")[2] in table and PROJECT["requires-python"].removeprefix(">=") in table
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "Python 3.11 or newer" in readme and "torch 2.13" in readme
    assert "Programming Language :: Python :: 3.11" in PROJECT["classifiers"]
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert (ROOT / "src" / "trainfit" / "py.typed").exists()


def test_the_workflow_runs_what_the_contributor_runs() -> None:
    workflow = read(".github/workflows/ci.yml")
    steps = workflow["jobs"]["check"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == ["scripts/check"]
    python = next(
        step["with"]["python-version"] for step in steps if "python-version" in step.get("with", {})
    )
    assert f">={python}" == PROJECT["requires-python"]  # the oldest that is supported


@pytest.mark.parametrize("name", ["bug.yml", "wrong-prediction.yml"])
def test_issue_templates_ask_for_something(name: str) -> None:
    template = read(f".github/ISSUE_TEMPLATE/{name}")
    assert template["name"] and template["description"]
    assert any(part["validations"]["required"] for part in template["body"] if "validations" in part)
    assert len({part["id"] for part in template["body"]}) == len(template["body"])


def test_scripts_can_be_run_and_are_in_the_check() -> None:
    check = (ROOT / "scripts" / "check").read_text(encoding="utf-8")
    for name in ("docs", "package", "test"):
        assert os.access(ROOT / "scripts" / name, os.X_OK)
        assert re.search(rf"^scripts/{name}\b", check, re.MULTILINE)


def test_what_the_documentation_is_built_with_is_pinned() -> None:
    for text in PROJECT["optional-dependencies"]["docs"]:
        name = re.match(r"[\w-]+", text)
        assert name is not None and f"\n{name[0]}==" in CONSTRAINTS
