"""Values are compared bit by bit, and nothing is called equal that was not compared."""

from __future__ import annotations

import enum
import math
import warnings
from collections import OrderedDict, UserDict, deque, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from trainfit.comparing import Match, compare, contents_of

NAN, INF = math.nan, math.inf
OTHER_NAN = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
Pair = namedtuple("Pair", "loss accuracy")


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Output:
    loss: Any
    extra: Any = None


class Opaque:
    """Has no comparison of its own."""


class AlwaysEqual:
    """Claims to equal everything."""

    def __eq__(self, other: object) -> bool:
        return True


def matched(first: Any, second: Any) -> Match:
    return compare(contents_of(first), contents_of(second))


def ragged(scale: float, layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nested tensors are a prototype
        return torch.nested.nested_tensor([torch.ones(2) * scale, torch.ones(3)], layout=layout)


def compressed(scale: float) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that sparse CSR is in beta
        return (torch.eye(3) * scale).to_sparse_csr()


# Each is equal to a second one made in the same way, and different from what stands beside it.
PAIRS = {
    "float": (lambda: 0.5, 0.25),
    "float, the next one": (lambda: 1.0, math.nextafter(1.0, 2.0)),
    "NaN against 0": (lambda: NAN, 0.0),
    "NaN against a number": (lambda: NAN, 3.0),
    "NaN against infinity": (lambda: NAN, INF),
    "zero against minus zero": (lambda: 0.0, -0.0),
    "infinity": (lambda: INF, -INF),
    "complex": (lambda: complex(1, NAN), complex(1, 0)),
    "int": (lambda: 10**400, 10**400 + 1),
    "int against bool": (lambda: 1, True),
    "int against float": (lambda: 1, 1.0),
    "text": (lambda: "a", "b"),
    "bytes": (lambda: b"a", b"b"),
    "None": (lambda: (None, 1), (1, 1)),
    "enum": (lambda: Colour.RED, Colour.BLUE),
    "dtype": (lambda: torch.float32, torch.float64),
    "class": (lambda: Output, Opaque),
    "tensor": (lambda: torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])),
    "tensor, NaN against 0": (lambda: torch.tensor([1.0, NAN]), torch.tensor([1.0, 0.0])),
    "tensor, NaN against a number": (lambda: torch.tensor([1.0, NAN]), torch.tensor([1.0, 7.0])),
    "tensor, minus zero": (lambda: torch.zeros(2), -torch.zeros(2)),
    "tensor, dtype": (lambda: torch.ones(2), torch.ones(2, dtype=torch.float64)),
    "tensor, shape": (lambda: torch.ones(2, 3), torch.ones(3, 2)),
    "tensor, empty": (lambda: torch.ones(0, 3), torch.ones(3, 0)),
    "tensor, scalar": (lambda: torch.tensor(1.0), torch.tensor([1.0])),
    "tensor, bool": (lambda: torch.tensor([True]), torch.tensor([False])),
    "tensor, large int": (lambda: torch.tensor(2**62), torch.tensor(2**62 + 1)),
    "tensor, bf16": (lambda: torch.ones(2).bfloat16(), torch.tensor([1.0, 1.0078125]).bfloat16()),
    "tensor, float8": (lambda: torch.ones(2).to(torch.float8_e4m3fn), torch.zeros(2).to(torch.float8_e4m3fn)),
    "tensor, complex": (lambda: torch.tensor([complex(1, NAN)]), torch.tensor([complex(1, 0)])),
    "tensor, not contiguous": (lambda: torch.eye(4)[:, 1], torch.zeros(4)),
    "sparse": (lambda: torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse()),
    "sparse against dense": (lambda: torch.eye(3).to_sparse(), torch.eye(3)),
    "sparse, other places": (lambda: torch.eye(2).to_sparse(), torch.eye(2).flip(0).to_sparse()),
    "sparse rows": (lambda: compressed(1.0), compressed(2.0)),
    "nested": (lambda: ragged(1.0, torch.strided), ragged(2.0, torch.strided)),
    "nested, jagged": (lambda: ragged(1.0, torch.jagged), ragged(2.0, torch.jagged)),
    "array": (lambda: numpy.arange(4.0)[::-1], numpy.arange(4.0)),
    "array, NaN": (lambda: numpy.array([NAN, 1.0]), numpy.array([0.0, 1.0])),
    "array, dtype": (lambda: numpy.ones(2), numpy.ones(2, numpy.float32)),
    "array of texts": (lambda: numpy.array(["a"]), numpy.array(["b"])),
    "array of objects": (lambda: numpy.array([1, None], object), numpy.array([1, 2.0], object)),
    "array with fields": (lambda: numpy.zeros(2, "i4,f8"), numpy.ones(2, "i4,f8")),
    "NumPy's scalar": (lambda: numpy.float32(NAN), numpy.float32(0.0)),
    "NumPy's scalar against Python's": (lambda: numpy.float64(1.0), 1.0),
    "list": (lambda: [1, [2.0]], [1, [NAN]]),
    "list, longer": (lambda: [1], [1, 2]),
    "list against tuple": (lambda: [1], (1,)),
    "empty list against empty tuple": (lambda: [1, []], [1, ()]),
    "named tuple": (lambda: Pair(torch.ones(1), 0.5), Pair(torch.ones(1), 0.6)),
    "deque": (lambda: deque([1.0]), deque([2.0])),
    "dict": (lambda: {"loss": torch.ones(1), "n": 1}, {"loss": torch.zeros(1), "n": 1}),
    "dict, other key": (lambda: {"loss": 1}, {"cost": 1}),
    "dict, numbered": (lambda: {(0, "a"): 1.0}, {(0, "b"): 1.0}),
    "dict by tensors": (lambda: {torch.ones(1): 1.0}, {torch.ones(1): 2.0}),
    "ordered dict": (lambda: OrderedDict(loss=1.0), OrderedDict(loss=2.0)),
    "user's dict": (lambda: UserDict(loss=1.0), UserDict(loss=2.0)),
    "set": (lambda: {1, "a"}, {1, "b"}),
    "data class": (lambda: Output(0.5), Output(NAN)),
    "data class, nested": (lambda: Output([Output(0.5)]), Output([Output(0.6)])),
    "namespace": (lambda: SimpleNamespace(loss=1.0), SimpleNamespace(loss=2.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_the_same_is_equal_and_another_is_not(name: str) -> None:
    make, other = PAIRS[name]
    same = matched(make(), make())
    assert same.equal is True and same.compared > 0 and same.largest_difference == 0.0
    assert same.differences == ()
    for first, second in ((make(), other), (other, make())):
        match = matched(first, second)
        assert match.equal is False
        assert match.differences and all(line.startswith("result") for line in match.differences)


def test_every_nan_is_nan() -> None:
    assert OTHER_NAN.isnan().all()
    assert matched(OTHER_NAN, torch.tensor([NAN])).equal is True
    assert matched([NAN, -NAN], [-NAN, NAN]).equal is True


def test_huggingface_outputs_are_compared_by_what_they_hold() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def output(loss: float) -> Any:
        return outputs.CausalLMOutput(loss=torch.tensor(loss), logits=torch.ones(2, 3))

    assert matched(output(1.0), output(1.0)).equal is True
    match = matched(output(1.0), output(NAN))
    assert match.equal is False and match.differences == ("result['loss']: 1.0 and nan",)


@pytest.mark.parametrize("make", [Opaque, AlwaysEqual, lambda: print, lambda: torch.nn.Linear(2, 2)])
def test_an_object_that_cannot_be_taken_apart_is_not_called_equal(make: Any) -> None:
    match = matched(make(), make())
    assert match.equal is None and match.compared == 0
    assert len(match.not_compared) == 1 and match.not_compared[0].startswith("result (")
    beside = matched({"loss": 1.0, "state": make()}, {"loss": 1.0, "state": make()})
    assert beside.equal is True and beside.compared == 1
    assert beside.not_compared[0].startswith("result['state'] (")
    assert matched(make(), 1.0).equal is False


def test_nothing_is_not_equal() -> None:
    assert matched(None, None).equal is None
    assert matched([], []).equal is None
    assert matched(None, 1.0).equal is False


def test_a_tensor_without_memory_is_not_compared() -> None:
    assert matched(torch.ones(2, device="meta"), torch.ones(2, device="meta")).equal is None


def test_a_container_that_contains_itself() -> None:
    def endless(value: float) -> list[Any]:
        made: list[Any] = [value]
        made.append(made)
        return made

    assert matched(endless(1.0), endless(1.0)).equal is True
    assert matched(endless(1.0), endless(2.0)).equal is False


def test_what_is_too_deep_is_not_compared() -> None:
    deep: Any = 1.0
    for _ in range(5000):
        deep = [deep]
    match = matched(deep, deep)
    assert match.equal is None and "levels deep" in match.not_compared[0]


def test_a_difference_says_where_and_how_much() -> None:
    first = torch.zeros(2, 3)
    second = first.clone()
    second[1, 2] = 0.5
    match = matched({"logits": first}, {"logits": second})
    assert match.differences == ("result['logits']: 1 of 6 elements, the first at [1, 2]: 0.0 and 0.5",)
    assert match.largest_difference == 0.5
    assert matched(first, torch.full((2, 3), NAN)).largest_difference == INF
    assert matched(NAN, 0.0).largest_difference == INF
    assert matched(3, 5).largest_difference == 2.0


def test_a_copy_is_what_it_was() -> None:
    value, array = torch.ones(2), numpy.ones(2)
    before = contents_of([value, array])
    value.zero_()
    array[:] = 0.0
    assert compare(before, contents_of([torch.ones(2), numpy.ones(2)])).equal is True
