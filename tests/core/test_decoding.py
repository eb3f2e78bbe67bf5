"""JSON into dataclasses: exact types, and a path to what is wrong."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.basics.decoding import LARGEST_INTEGER, Malformed, decode, encode, parse_json


@dataclass(frozen=True)
class Leaf:
    name: str
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Tree:
    count: int
    share: float
    flag: bool
    kind: Literal["oak", "elm"]
    leaf: Leaf | None
    leaves: tuple[Leaf, ...]
    pairs: tuple[tuple[str, int], ...]
    rates: dict[str, float]


TREE = Tree(3, 0.5, True, "elm", None, (Leaf("a", (1, 2)), Leaf("b")), (("x", 1),), {"fp32": 2.0})
OBJECT: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(TREE)))
ROW: list[Any] = json.loads(json.dumps(encode(TREE)))


def wrong(**changes: Any) -> Malformed:
    with pytest.raises(Malformed) as raised:
        decode(Tree, OBJECT | changes)
    return raised.value


def test_objects_and_rows_are_read() -> None:
    assert decode(Tree, OBJECT) == TREE
    assert decode(Tree, ROW, rows=True) == TREE
    assert decode(Tree, OBJECT | {"leaves": ROW[5]}, rows=True) == TREE


def test_whole_numbers_are_fine_for_floats_and_become_floats() -> None:
    found = decode(Tree, OBJECT | {"share": 2})
    assert found.share == 2.0 and type(found.share) is float


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": True}, "count: expected a whole number, found true"),
        ({"count": 1.0}, "count: expected a whole number, found 1.0"),
        ({"count": LARGEST_INTEGER + 1}, "count: expected at most 62 bits, found 4611686018427387905"),
        ({"share": float("nan")}, "share: expected a finite number, found nan"),
        ({"share": float("inf")}, "share: expected a finite number, found inf"),
        ({"share": 10**400}, f"share: expected a finite number, found 1{'0' * 39}..."),
        ({"share": True}, "share: expected a finite number, found true"),
        ({"flag": 1}, "flag: expected true or false, found 1"),
        ({"kind": "ash"}, "kind: expected one of oak, elm, found 'ash'"),
        ({"kind": ["elm"]}, "kind: expected one of oak, elm, found a list"),
        ({"leaf": 3}, "leaf: expected an object, found 3"),
        ({"leaf": {"name": 3, "sizes": []}}, "leaf.name: expected text, found 3"),
        ({"leaves": {}}, "leaves: expected a list, found an object"),
        ({"leaves": [{"name": "", "sizes": [""]}]}, "leaves[0].sizes[0]: expected a whole number, found ''"),
        ({"leaves": [["a", []]]}, "leaves[0]: expected an object, found a list"),
        ({"pairs": [["x", 1], ["y"]]}, "pairs[1]: expected 2 values, found 1"),
        ({"pairs": [["x", 1], ["y", "z"]]}, "pairs[1][1]: expected a whole number, found 'z'"),
        ({"rates": {"fp32": "fast"}}, "rates.fp32: expected a finite number, found 'fast'"),
        ({"rates": {"a\nb": "fast"}}, "rates.'a\\nb': expected a finite number, found 'fast'"),
        ({"leafs": 1}, "there is no field leafs (did you mean 'leaf'?)"),
        ({"leaf": {"name": "a", "sizes": [], "zz": 1}}, "leaf: there is no field zz (they are name, sizes)"),
        ({"leaf": {"name": "a"}}, "leaf: the field 'sizes' is missing"),
    ],
)  # fmt: skip
def test_the_message_has_the_path(changes: dict[str, Any], message: str) -> None:
    assert str(wrong(**changes)) == message


def test_rows_have_the_same_path() -> None:
    row = [*ROW[:5], [["a", [1]], ["b", ["x"]]], *ROW[6:]]
    with pytest.raises(Malformed, match=r"^leaves\[1\]\.sizes\[0\]: expected a whole number, found 'x'$"):
        decode(Tree, row, rows=True)
    with pytest.raises(Malformed, match=r"^expected 8 values, found 7$"):
        decode(Tree, ROW[1:], rows=True)
    with pytest.raises(Malformed, match=r"^expected an object, found a list$"):
        decode(Tree, ROW)


def test_what_may_be_left_out_and_what_is_ignored() -> None:
    assert decode(Leaf, {"name": "a"}, defaults=True) == Leaf("a")
    assert decode(Leaf, {"name": "a", "sizes": [], "more": 1}, surplus=True) == Leaf("a")
    with pytest.raises(Malformed, match="the field 'name' is missing"):
        decode(Leaf, {"sizes": []}, defaults=True)
    with pytest.raises(Malformed, match="there is no field more"):
        decode(Leaf, {"name": "a", "more": 1}, defaults=True)


@pytest.mark.parametrize("text", ["", "{", "NaN", "[1, Infinity]", "[" * 100_000, b"\xff", "9" * 5000])
def test_only_json_is_parsed(text: str | bytes) -> None:
    with pytest.raises(Malformed, match=r"^truncated or not JSON$"):
        parse_json(text)


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.sampled_from([*OBJECT, "name"]), inner),
))  # fmt: skip
def test_any_value_is_read_or_refused_in_one_line(value: Any) -> None:
    for rules in ({}, {"rows": True}, {"defaults": True, "surplus": True}):
        try:
            found = decode(Tree, value, **rules)
        except Malformed as error:
            assert "\n" not in str(error)
        else:
            assert decode(Tree, encode(found), rows=True) == found
