"""`compat.ilp_utils`: tables by hand, and read off torch's own trackers, also where torch's fails."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import made_up_modules as made_up
import numpy as np
import pytest
import torch
from made_up_modules import MIB, Part
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools import ilp_utils as torch_utils
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.runtime_estimator import RuntimeEstimator
from torch.distributed._tools.sac_estimator import SACEstimator

from trainfit.compat import ilp_utils
from trainfit.compat.ilp_utils import ModStats, aggregate_stats, parse_module_info
from trainfit.errors import GraphError, OptionError

CPU = torch.device("cpu")
COST_MODEL = "operator-level-cost-model"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


class Plain(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Twice(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[0](self.blocks[0](x)))


@dataclasses.dataclass
class Output:
    y: torch.Tensor


class ReturnsObject(Plain):
    def forward(self, x: torch.Tensor) -> Output:
        return Output(super().forward(x))


class Shared(nn.Module):
    """The block is in both parts, and belongs to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(Block())
        self.two = nn.Sequential(self.one[0], nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


class Odd(nn.Module):
    """A part without ops, a part without gradients, a part that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Identity()
        self.frozen = Block()
        self.block = Block()
        self.unused = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():  # torch's tracker raises for parameters that need no gradient
            x = self.frozen(self.nothing(x))
        return self.block(x)


@dataclasses.dataclass
class Trackers:
    model: nn.Module
    memory: Any
    runtime: Any
    sac: Any

    def stats(self, aggregate: Any = aggregate_stats) -> Any:
        np.random.seed(0)  # torch fits its lines by chance
        return aggregate(self.model, self.memory, self.runtime, self.sac, CPU)


class NoTradeOff:
    """An estimator that has seen no module; torch's needs a library to fit lines."""

    def __init__(self, **curves: Any) -> None:
        self.sac_mod_tradeoff_stats = curves

    def pwlf_sac_tradeoff_curve(self) -> None:
        pass


@pytest.fixture
def _one_millisecond_per_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's cost model asks CUDA for the device: here every op takes a millisecond."""

    def estimate(cls: type, func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        return func(*args, **(kwargs or {})), 1.0

    monkeypatch.setattr(RuntimeEstimator, "_roofline_estimate", classmethod(estimate))


pytestmark = [
    pytest.mark.usefixtures("_one_millisecond_per_op"),
    pytest.mark.filterwarnings("ignore"),  # torch's trackers use what torch deprecates
]


def watched(
    model_class: Any, *, steps: int = 1, sac: bool = False, loss: nn.Module | None = None
) -> Trackers:
    """Run a step under each of torch's trackers."""
    with FakeTensorMode():
        model, x = model_class(), torch.randn(32, 64)

        def forward() -> torch.Tensor:
            out = model(x)
            out = out.y if isinstance(out, Output) else out
            return out.sum() if loss is None else loss(out, x)

        memory, runtime = MemTracker(), RuntimeEstimator()
        memory.track_external(model)
        with memory:
            forward().backward()
            model.zero_grad()
        with runtime(COST_MODEL):
            for _ in range(steps):
                forward().backward()
                model.zero_grad()
        estimator: Any = NoTradeOff()
        if sac:
            estimator = SACEstimator()
            with estimator(COST_MODEL):
                value = forward()
            value.backward()
    return Trackers(model, memory, runtime, estimator)


def by_name(info: Any) -> dict[str, ModStats]:
    return {one["fqn"]: one for one in info["mod_stats"]}


def test_the_same_statistics_as_torch() -> None:
    pytest.importorskip("pwlf")
    seen = watched(Plain, sac=True)
    theirs, ours = seen.stats(torch_utils.aggregate_stats), seen.stats()
    assert ours == theirs
    assert [one["is_leaf"] for one in ours["mod_stats"]] == [
        False,
        False,
        True,
        True,
        False,
        True,
        True,
        True,
    ]
    graph, expected = parse_module_info(ours), torch_utils.parse_module_info(copy.deepcopy(theirs))
    assert graph.nodes == expected.nodes and graph.name2node == expected.name2node
    assert graph.fw_post_order == expected.fw_post_order
    assert np.array_equal(graph.ad_matrix, expected.ad_matrix)
    assert ilp_utils.get_peak_memory_runtime_baseline(graph) == torch_utils.get_peak_memory_runtime_baseline(
        expected
    )


def test_a_module_called_twice_counts_twice() -> None:
    """torch: the graph of it is an AssertionError, and its row has only one call's activations."""
    seen = watched(Twice)
    with pytest.raises(AssertionError):
        torch_utils.parse_module_info(seen.stats(torch_utils.aggregate_stats))
    info = seen.stats()
    graph = parse_module_info(info)
    assert [node["fqn"] for node in graph.nodes] == [
        "Twice",
        "Twice.blocks.0",
        "Twice.blocks.0.a",
        "Twice.blocks.0.b",
        "Twice.head",
    ]
    assert info["mod_order"]["fw_pre_order"].count("Twice.blocks.0") == 2
    # A call leaves what relu made, of 32 x 64 numbers, besides its output.
    block = graph.name2node["Twice.blocks.0"]
    assert block["act_fw_per_module"] == 2 * 32 * 64 * 4
    # Its own moment is the end of the second call, whose backward comes first: only the head has gradients.
    assert block["act_total"] == 4 * 32 * 64 * 4
    assert block["grad_total"] == (64 + 1) * 64 * 4
    assert graph.fw_post_order == [
        f"Twice.{name}" for name in ("blocks.0.a", "blocks.0.b", "blocks.0", "head")
    ] + ["Twice"]
    assert block["pos_fw_post_order"] == 2


def test_both_calls_are_computed_again() -> None:
    """The estimator's trade-off is that of one call."""
    seen = watched(Twice)
    curve = SimpleNamespace(
        sac_runtime=5.0,
        sac_memory=1 << 14,
        n_segments=1,
        slopes=[1.0],
        intercepts=[0.0],
        fit_breaks=[0.0, 1.0],
        tradeoff_curve=OrderedDict({0.0: 0.0}),
    )
    seen.sac = NoTradeOff(**{"Twice.blocks.0": curve, "Twice": curve})
    rows = by_name(seen.stats())
    assert (rows["Twice.blocks.0"]["sac_runtime"], rows["Twice.blocks.0"]["sac_memory"]) == (10.0, 2 << 14)
    assert (rows["Twice"]["sac_runtime"], rows["Twice"]["sac_memory"]) == (5.0, 1 << 14)
    assert not rows["Twice"]["is_leaf"] and rows["Twice.head"]["is_leaf"]


def test_a_root_that_returns_an_object_has_the_statistics_of_one_that_does_not() -> None:
    """torch: a KeyError, because the tracker does not see the root's backward begin."""
    seen = watched(ReturnsObject)
    with pytest.raises(KeyError):
        seen.stats(torch_utils.aggregate_stats)
    rows, plain = by_name(seen.stats()), by_name(watched(Plain).stats())
    root, same = rows["ReturnsObject"], plain["Plain"]
    for key in (
        "param_per_module",
        "grad_total",
        "act_total",
        "act_grad_per_module",
        "fw_runtime_per_module",
    ):
        assert root[key] == same[key], key  # type: ignore[literal-required]
    # All of the step's backward is inside of the model, but for the gradient of the sum.
    assert same["bw_runtime_per_module"] <= root["bw_runtime_per_module"]
    assert root["bw_runtime_per_module"] <= seen.runtime.mod_runtimes["Global"]["bw"]
    assert rows["ReturnsObject.head"] == {**plain["Plain.head"], "fqn": "ReturnsObject.head"}
    graph = parse_module_info(seen.stats())
    assert (
        ilp_utils.get_peak_memory_runtime_baseline(graph)[0]
        == (ilp_utils.get_peak_memory_runtime_baseline(parse_module_info(watched(Plain).stats()))[0])
    )


def test_a_shared_module_has_the_name_of_its_first_place() -> None:
    """torch: it is called by its last place, its parts by their first, and there is no graph."""
    seen = watched(Shared)
    assert "Shared.two.0" in seen.runtime.mod_fw_pre_order
    graph = parse_module_info(seen.stats())
    names = [node["fqn"] for node in graph.nodes]
    assert names == [
        "Shared",
        "Shared.one",
        "Shared.one.0",
        "Shared.one.0.a",
        "Shared.one.0.b",
        "Shared.two",
        "Shared.two.1",
    ]
    inside_two = [names[place] for place in graph.ad_matrix[names.index("Shared.two")].nonzero()[0]]
    assert inside_two == ["Shared.one.0", "Shared.one.0.a", "Shared.one.0.b", "Shared.two", "Shared.two.1"]
    assert graph.name2node["Shared.one.0"]["fw_runtime_per_module"] == pytest.approx(
        graph.name2node["Shared.one"]["fw_runtime_per_module"] * 2
    )


def test_modules_without_ops_or_without_backward() -> None:
    """torch: a KeyError for either of them."""
    seen = watched(Odd)
    with pytest.raises(KeyError):
        seen.stats(torch_utils.aggregate_stats)
    rows = by_name(seen.stats())
    assert rows["Odd.nothing"]["fw_runtime_per_module"] == rows["Odd.nothing"]["bw_runtime_per_module"] == 0
    frozen = rows["Odd.frozen"]
    assert (frozen["grad_total"], frozen["act_grad_per_module"], frozen["bw_runtime_per_module"]) == (0, 0, 0)
    assert frozen["param_per_module"] == 2 * 65 * 64 * 4
    assert not any("unused" in name for name in rows)
    assert parse_module_info(seen.stats()).nodes


def test_modules_outside_of_the_model_are_left_out() -> None:
    """torch: a loss that is a module has no row, and breaks the graph."""
    seen = watched(Plain, loss=nn.MSELoss())
    assert "MSELoss" in seen.runtime.mod_fw_pre_order
    info = seen.stats()
    assert all(name.startswith("Plain") for order in info["mod_order"].values() for name in order)
    assert len(parse_module_info(info).nodes) == 8


def test_several_steps_are_counted_as_one() -> None:
    one, three = watched(Plain), watched(Plain, steps=3)
    assert three.runtime.mod_fw_pre_order.count("Plain") == 3
    once, in_each = by_name(one.stats()), by_name(three.stats())
    assert list(in_each) == list(once)
    for name, stats in once.items():
        for key, value in stats.items():
            # Whether autograd copies a gradient depends on who else holds it just then: an op more or less.
            expected = pytest.approx(value, abs=1.0) if "runtime" in key else value
            assert in_each[name][key] == expected, (name, key)


State = enum.Enum("State", "PRE_FW POST_FW PRE_BW PEAK_BW")
Kind = enum.Enum("Kind", "ACT GRAD TEMP")
GPU = torch.device("cuda:1")


def by_hand(model: nn.Module, **modules: dict[str, list[tuple[int, int, int]]]) -> tuple[Any, Any]:
    """Return trackers, with enums of their own, that have seen these activations, gradients and temporaries.

    Every module has 8 bytes of parameters, 2 of outputs, and takes 1.5 and 2.5 ms.
    """
    tracking = {}
    calls = [name for name, states in modules.items() for _ in states["PRE_FW"]]
    for name, states in modules.items():
        snapshots = {
            State[state]: [{GPU: {**dict(zip(Kind, one)), "Total": sum(one)}} for one in sizes]
            for state, sizes in states.items()
        }
        module = model.get_submodule(name.partition(".")[2])
        tracking[module] = SimpleNamespace(
            mod_fqn=name, parameter_mem=8, input_mem=1, output_mem=2, buffer_mem=0, snapshots=snapshots
        )
    runtime = SimpleNamespace(
        mod_runtimes={name: {"fw": 1.5, "bw": 2.5} for name in modules},
        **{f"mod_{which}_{part}_order": calls for which in ("fw", "bw") for part in ("pre", "post")},
    )
    return SimpleNamespace(memory_tracking=tracking), runtime


ONE_CALL = {"PRE_FW": [(0, 0, 0)], "POST_FW": [(9, 0, 0)], "PRE_BW": [(9, 4, 1)], "PEAK_BW": [(7, 4, 6)]}
MEMORY = ("act_fw_per_module", "act_total", "grad_total", "act_grad_per_module", "act_bw_per_module")


def test_the_gpu_of_a_tracker_with_one_needs_no_number() -> None:
    model = nn.Linear(1, 1)
    memory, runtime = by_hand(model, Linear=ONE_CALL)
    for device in (torch.device("cuda"), GPU):
        info = aggregate_stats(model, memory, runtime, NoTradeOff(), device)
        row: Any = info["mod_stats"][0]
        assert [row[key] for key in MEMORY] == [7, 9, 4, 5, 7]
        graph = parse_module_info(info)
        assert ilp_utils.get_peak_memory_runtime_baseline(graph) == (8 + 4 + 5 + 9, 4.0)
    for device in (torch.device("cuda:0"), CPU):
        with pytest.raises(KeyError, match=f"nothing was tracked on {device}, only on cuda:1"):
            aggregate_stats(model, memory, runtime, NoTradeOff(), device)


def test_the_backward_of_the_last_call_comes_first() -> None:
    """Of the root's second step: its part is called twice in each."""
    model = nn.Sequential(nn.Linear(1, 1))
    part = {
        "PRE_FW": [(0, 0, 0)] * 2 + [(1, 0, 0), (11, 0, 0)],
        "POST_FW": [(0, 0, 0)] * 2 + [(9, 0, 0), (20, 0, 0)],
        "PRE_BW": [(0, 99, 0)] * 2 + [(20, 4, 1), (9, 6, 2)],
        "PEAK_BW": [(0, 99, 0)] * 2 + [(18, 4, 8), (7, 6, 3)],
    }
    memory, runtime = by_hand(
        model, Sequential={state: sizes * 2 for state, sizes in ONE_CALL.items()}, **{"Sequential.0": part}
    )
    row: Any = aggregate_stats(model, memory, runtime, NoTradeOff(), GPU)["mod_stats"][1]
    assert [row[key] for key in MEMORY] == [(8 - 2) + (9 - 2), 20, 4, 8 - 1, 18]
    assert row["fw_runtime_per_module"] == 0.75, "two steps were timed"


def test_a_backward_that_was_not_seen_begins_with_the_first_inside_and_peaks_with_the_largest() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    root = {"PRE_FW": [(0, 0, 0)], "POST_FW": [(20, 0, 0)]}
    early = {**ONE_CALL, "PRE_BW": [(9, 8, 2)], "PEAK_BW": [(9, 8, 30)]}
    late = {**ONE_CALL, "PRE_BW": [(19, 0, 1)], "PEAK_BW": [(18, 0, 5)]}
    memory, runtime = by_hand(model, Sequential=root, **{"Sequential.0": early, "Sequential.1": late})
    row: Any = aggregate_stats(model, memory, runtime, NoTradeOff(), GPU)["mod_stats"][0]
    assert [row[key] for key in MEMORY] == [18, 20, 0, 30 - 1, 9]
    assert row["bw_runtime_per_module"] == 2.5
    runtime.mod_runtimes["Sequential"]["bw"] = 0.0
    for everything, expected in (({}, 5.0), ({"bw": 9.0}, 5.0), ({"bw": 4.0}, 4.0)):
        runtime.mod_runtimes["Global"] = everything
        row = aggregate_stats(model, memory, runtime, NoTradeOff(), GPU)["mod_stats"][0]
        assert row["bw_runtime_per_module"] == expected, (
            "as long as both, but not longer than all of backward"
        )


def test_trackers_of_another_model_or_step_are_refused() -> None:
    seen = watched(Plain)
    with pytest.raises(OptionError, match="has not seen the Twice that it is asked about: run the step"):
        aggregate_stats(Twice(), seen.memory, seen.runtime, seen.sac, CPU)
    with pytest.raises(KeyError, match="the memory tracker has seen Plain, the runtime estimator has not"):
        aggregate_stats(seen.model, seen.memory, watched(Twice).runtime, seen.sac, CPU)


def test_modules_are_sorted_by_their_forward_and_the_table_stays_as_it_is() -> None:
    """torch sorts, and then goes through the table unsorted: index 0 is not the model."""
    info = made_up.table(made_up.transformer(2))
    info["mod_stats"].reverse()
    before = copy.deepcopy(info)
    graph = parse_module_info(info)
    assert info == before
    names = [node["fqn"] for node in graph.nodes]
    assert names == info["mod_order"]["fw_pre_order"] and names[0] == "Net"
    assert [node["index"] for node in graph.nodes] == list(range(len(names)))
    assert all(graph.fw_post_order[node["pos_fw_post_order"]] == node["fqn"] for node in graph.nodes)
    wrong = torch_utils.parse_module_info(copy.deepcopy(before))  # type: ignore[arg-type]
    assert wrong.nodes[0]["fqn"] != "Net"


def test_the_matrix_is_complete() -> None:
    """A part of Net.b runs inside of Net.a, before the rest of it: torch's row of Net.a ends there."""
    first, second = Part("Net.a.x"), Part("Net.a.y")
    guest = Part("Net.b.inner")
    root = Part("Net", [Part("Net.a", [first, guest, second]), Part("Net.b")])
    info = made_up.table(root)
    graph = parse_module_info(info)
    names = [node["fqn"] for node in graph.nodes]
    inside = {
        name: {names[place] for place in graph.ad_matrix[number].nonzero()[0]}
        for number, name in enumerate(names)
    }
    assert inside["Net"] == set(names)
    assert inside["Net.a"] == {"Net.a", "Net.a.x", "Net.b.inner", "Net.a.y"}
    assert inside["Net.b"] == {"Net.b", "Net.b.inner"}
    theirs = torch_utils.parse_module_info(copy.deepcopy(info))  # type: ignore[arg-type]
    assert theirs.ad_matrix[names.index("Net.a")].sum() == 2


def test_the_last_end_of_a_module_counts() -> None:
    """Before the second call has ended, not everything that it discards is there to be discarded."""
    info = made_up.table(Part("Net", [Part("Net.a"), Part("Net.b")]))
    info["mod_order"]["fw_pre_order"] = ["Net", "Net.a", "Net.b", "Net.a"]
    info["mod_order"]["fw_post_order"] = ["Net.a", "Net.b", "Net.a", "Net"]
    graph = parse_module_info(info)
    assert graph.fw_post_order == ["Net.b", "Net.a", "Net"]
    assert [node["pos_fw_post_order"] for node in graph.nodes] == [2, 1, 0]


def test_orders_of_different_calls_leave_the_names() -> None:
    """Orders that list each module once, of a model that calls one twice, do not nest by themselves."""
    info = made_up.table(Part("Net", [Part("Net.a", [Part("Net.a.x")]), Part("Net.b")]))
    info["mod_order"]["fw_post_order"] = ["Net.b", "Net.a.x", "Net", "Net.a"]
    graph = parse_module_info(info)
    assert graph.ad_matrix.tolist() == [[1, 1, 1, 1], [0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_tables_whose_names_do_not_agree_are_refused() -> None:
    def info() -> Any:
        return made_up.table(Part("Net", [Part("Net.a"), Part("Net.b")]))

    unknown = info()
    unknown["mod_order"]["fw_pre_order"].append("Net.c")
    with pytest.raises(AssertionError, match=r"Net\.c is in fw_pre_order, but has no statistics"):
        parse_module_info(unknown)
    missing = info()
    missing["mod_order"]["fw_post_order"].remove("Net.b")
    with pytest.raises(ValueError, match=r"Net\.b has statistics, but is not in fw_post_order"):
        parse_module_info(missing)
    doubled = info()
    doubled["mod_stats"].append(doubled["mod_stats"][1])
    with pytest.raises(GraphError, match=r"Net\.a is in the statistics twice"):
        parse_module_info(doubled)


def test_inside_goes_by_the_parts_of_a_name() -> None:
    assert ilp_utils.is_submodule("Net.Block.0.fc", "Net.Block")
    assert not ilp_utils.is_submodule("Net.Block.0.fc", "Block"), "torch looks for the text anywhere"
    assert not ilp_utils.is_submodule("Net.Block10.fc", "Net.Block1")
    assert not ilp_utils.is_submodule("Net.a", "Net.a")
    assert ilp_utils.is_self_or_submodule("Net.a", "Net.a")
    assert ilp_utils.is_self_or_submodule("Net.a.b", "Net")
    assert not ilp_utils.is_self_or_submodule("Net", "Net.a")


@pytest.mark.parametrize("unit", ["KiB", "MiB", "GiB", "bytes", "parsecs"])
def test_sizes_are_written_as_torch_does(unit: str) -> None:
    assert ilp_utils.display_bytes(3 * (1 << 29), unit) == torch_utils.display_bytes(3 * (1 << 29), unit)
    assert ilp_utils.display_bytes(3 * MIB // 2) == "1.50 MiB"


def test_the_baseline_by_hand() -> None:
    """The head: 108 MiB of parameters, all activations, and 60 for a while; at the first layer less."""
    graph = made_up.graph_of(made_up.transformer())
    assert ilp_utils.get_peak_memory_runtime_baseline(graph) == (
        (108 + 10 + 480 + 60 + 60) * MIB,
        pytest.approx(3 * (0.1 + 4 * 2.5 + 2.0)),
    )
    with pytest.raises(IndexError, match="no modules"):
        ilp_utils.get_peak_memory_runtime_baseline(ilp_utils.Graph(0))


def test_every_public_name_of_torch_is_there() -> None:
    theirs = {
        name
        for name, value in vars(torch_utils).items()
        if getattr(value, "__module__", "") == torch_utils.__name__ and not name.startswith("_")
    }
    assert theirs and theirs <= set(vars(ilp_utils))
    for name in ("ModStats", "ModuleInfo", "ModOrder", "ModRuntime", "Node"):
        mine, its = getattr(ilp_utils, name), getattr(torch_utils, name)
        assert set(mine.__annotations__) == set(its.__annotations__)
