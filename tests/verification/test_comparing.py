"""Values are compared bit by bit, and nothing is called equal that was not compared."""

from __future__ import annotations

import decimal
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
UINT64, STRINGS = torch.uint64, numpy.dtypes.StringDType()
OTHER_NAN = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
Pair = namedtuple("Pair", "loss accuracy")


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Output:
    loss: Any
    extra: Any = None


class Carrier(dict):  # type: ignore[type-arg]
    """A dict that also has attributes, as the outputs of some libraries do."""


class Listed(list):  # type: ignore[type-arg]
    """A list that also has attributes."""


class Slotted(tuple):  # type: ignore[type-arg]
    """A tuple that also has attributes."""


class Number(float):
    """A number that calls every other one equal."""

    __hash__ = float.__hash__

    def __eq__(self, other: object) -> bool:
        return True


class Text(str):
    __slots__ = ("__note",)
    __hash__ = str.__hash__

    def noted(self, note: Any) -> Text:
        self.__note = note
        return self

    def __eq__(self, other: object) -> bool:
        return True


class Array(numpy.ndarray):  # type: ignore[type-arg]
    """An array with attributes."""


class Own(torch.Tensor):
    """A tensor of a class of one's own."""


class Opaque:
    """Has no comparison of its own."""


class AlwaysEqual:
    """Claims to equal everything."""

    def __eq__(self, other: object) -> bool:
        return True


def carrying(value: Any, **attributes: Any) -> Any:
    """Return the value with attributes."""
    for name, attribute in attributes.items():
        setattr(value, name, attribute)
    return value


def quantised(scale: float) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that quantised tensors will go
        return torch.quantize_per_tensor(torch.zeros(2), scale, 0, torch.qint8)


def masked(mask: list[int], fill: float = 9.0) -> Any:
    return numpy.ma.array([1.0, 2.0], mask=mask, fill_value=fill)


def with_gradient(scale: float) -> torch.Tensor:
    tensor = torch.ones(2, requires_grad=True)
    (tensor * scale).sum().backward()
    return tensor


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
    "dict, attribute": (lambda: carrying(Carrier(a=1), logits=0.5), carrying(Carrier(a=1), logits=0.6)),
    "dict, another class": (lambda: Carrier(a=1), {"a": 1}),
    "dict by other tensors": (lambda: {torch.ones(1): 1.0}, {torch.zeros(1): 1.0}),
    "dict by NaN twice": (lambda: {float("nan"): 1, float("nan"): 2}, {float("nan"): 3, float("nan"): 2}),
    "dict by long numbers": (lambda: {10**5000: 1}, {10**5000 + 1: 1}),
    "dict by texts of a class of one's own": (lambda: {Text("a"): 1}, {Text("b"): 1}),
    "list, attribute": (lambda: carrying(Listed([1]), extra=0.0), carrying(Listed([1]), extra=-0.0)),
    "tuple, attribute": (lambda: carrying(Slotted([1]), extra=1), carrying(Slotted([1]), extra=2)),
    "data class, attribute": (lambda: carrying(Output(1.0), hidden=0.5), carrying(Output(1.0), hidden=0.6)),
    "number of a class of one's own": (lambda: Number(1.0), Number(2.0)),
    "number, attribute": (lambda: carrying(Number(1.0), count=1), carrying(Number(1.0), count=2)),
    "text of a class of one's own": (lambda: Text("a").noted(1), Text("b").noted(1)),
    "text, slot": (lambda: Text("a").noted(1), Text("a").noted(2)),
    "enum, value": (lambda: enum.Enum("E", {"A": 1}).A, enum.Enum("E", {"A": 2}).A),
    "complex, as far apart as can be": (lambda: complex(1.7e308, 1.7e308), complex(-1.7e308, -1.7e308)),
    "int of many digits": (lambda: 10**5000, 10**5000 + 1),
    "slice": (lambda: slice(torch.ones(1), 2), slice(torch.zeros(1), 2)),
    "range": (lambda: range(3), range(4)),
    "masked array, mask": (lambda: masked([1, 0]), masked([0, 0])),
    "masked array, values": (lambda: masked([0, 0]), masked([0, 0]) + 1.0),
    "masked array, fill value": (lambda: masked([1, 0]), masked([1, 0], fill=8.0)),
    "masked array against array": (lambda: masked([0, 0]), numpy.array([1.0, 2.0])),
    "array of a class of one's own": (lambda: numpy.ones(2).view(Array), numpy.ones(2)),
    "array, attribute": (lambda: carrying(Array(0), mode=1), carrying(Array(0), mode=2)),
    "array of long texts": (lambda: numpy.array(["a" * 99], STRINGS), numpy.array(["b" * 99], STRINGS)),
    "array of times": (lambda: numpy.array(["2026-01-01"], "M8[D]"), numpy.array(["2026-01-02"], "M8[D]")),
    "array, fields of fields": (lambda: numpy.zeros(2, [("a", "i4,f8")]), numpy.ones(2, [("a", "i4,f8")])),
    "NumPy's scalar against an array": (lambda: numpy.float32(1.0), numpy.array(1.0, numpy.float32)),
    "tensor, attribute": (lambda: carrying(torch.ones(1), note=1), carrying(torch.ones(1), note=2)),
    "tensor, gradient": (lambda: with_gradient(1.0), with_gradient(2.0)),
    "tensor of a class of one's own": (lambda: Own([1.0]), torch.ones(1)),
    "tensor of that class, attribute": (lambda: carrying(Own([1.0]), note=1), carrying(Own([1.0]), note=2)),
    "tensor of that class, values": (lambda: Own([1.0]), Own([0.0])),
    "tensor, unsigned": (lambda: torch.tensor(2**63, dtype=UINT64), torch.tensor(2**63 + 1, dtype=UINT64)),
    "quantised, scale": (lambda: quantised(0.1), quantised(0.2)),
    "sequence with names": (lambda: torch.max(torch.eye(2), 0), torch.max(torch.ones(2, 2), 0)),
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


@dataclass
class Failure(Exception):
    loss: float


# Each has something to compare, and something else that cannot be.
IN_PART = {
    "set": (lambda: {1, Opaque()}, "result{...} (1 members of a set)"),
    "attribute": (lambda: carrying(Carrier(a=1), state=Opaque()), f"result.state ({__name__}.Opaque)"),
    "key": (lambda: {Opaque(): 1}, f"result[key 0] ({__name__}.Opaque)"),
    "class that is made anew": (lambda: (1, type("Anew", (), {})), f"result[1] (the class {__name__}.Anew)"),
    "what an error keeps": (lambda: Failure(1.0), "result as Exception (Exception)"),
    "decimal": (lambda: (1, decimal.Decimal("0.1")), "result[1] (decimal.Decimal)"),
    "long double": (lambda: (1, numpy.longdouble(1)), "result[1] (numpy.longdouble of float128)"),
}


@pytest.mark.parametrize("name", IN_PART)
def test_a_part_that_cannot_be_compared_is_listed(name: str) -> None:
    make, line = IN_PART[name]
    match = matched(make(), make())
    assert match.differences == () and match.compared >= 1
    assert line in match.not_compared


def test_unknown_objects_of_two_classes_are_different() -> None:
    assert matched((1, Opaque()), (1, AlwaysEqual())).equal is False
    assert matched({1, Opaque()}, {1, Opaque(), Opaque()}).equal is False
    assert matched(torch.ones(2, device="meta"), torch.ones(3, device="meta")).equal is False


def test_an_attribute_that_is_the_tensor_itself() -> None:
    def endless(value: float) -> torch.Tensor:
        tensor = torch.tensor(value)
        carried: torch.Tensor = carrying(tensor, itself=tensor)
        return carried

    assert matched(endless(1.0), endless(1.0)).equal is True
    assert matched(endless(1.0), endless(2.0)).equal is False


def test_what_differs_by_itself_proves_nothing() -> None:
    first, second, again = ({"loss": 1.0, "time": time, "n": 1} for time in (3.0, 4.0, 5.0))
    by_itself = matched(first, again)
    match = matched(first, second).apart_from(by_itself, "it is another each time")
    assert match.equal is None and match.unsteady and match.differences == ()
    assert match.not_compared == ("result['time']: it is another each time (3.0 and 5.0)",)
    assert match.compared == 2 and match.largest_difference == INF
    match = matched(first, second | {"loss": 2.0}).apart_from(by_itself, "it is another each time")
    assert match.equal is False and match.differences == ("result['loss']: 1.0 and 2.0",)
    assert match.largest_difference == 1.0


def test_a_name_that_is_another_each_time_proves_nothing() -> None:
    first, second, again = ({f"step {number}": 1.0} for number in range(3))
    match = matched(first, second).apart_from(matched(first, again), "so it is")
    assert match.equal is None and len(match.not_compared) == 2
    assert matched(first, second).apart_from(matched(first, first), "so it is").equal is False


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


def test_of_distributed_tensors_the_part_that_is_here_is_compared() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        one, same = (DTensor.from_local(torch.arange(4.0), mesh, [Shard(0)]) for _ in range(2))
        other = DTensor.from_local(torch.arange(4.0) + 1, mesh, [Shard(0)])
        copied = DTensor.from_local(torch.arange(4.0), mesh, [Replicate()])
        found = [compare(contents_of(one), contents_of(second)) for second in (same, other, copied)]
    finally:
        dist.destroy_process_group()
    assert [match.equal for match in found] == [True, False, False]
    assert all(not match.not_compared for match in found)
    assert found[1].largest_difference == 1.0
    assert any("placements" in line for line in found[2].differences)
