"""`SACEstimator`: ops, groups, order and trade-off of modules, beside torch's own and by hand."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from small_models import Shape, Tower, Transformer, Twice, Wrapped
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools import runtime_estimator as torch_runtimes
from torch.distributed._tools import sac_estimator as torchs

from trainfit.compat.captured_step import CapturedStep
from trainfit.compat.sac_estimator import SACEstimator, SACStats
from trainfit.compat.sac_readings import greedy_order_of
from trainfit.compat.trade_off_fit import fitted
from trainfit.steps.step import Step

DEVICE = "a100-sxm-40gb"
COST_MODEL = "operator-level-cost-model"


class InPlace(nn.Module):
    """Three operators that overwrite the result of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 10)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin_(torch.cos_(self.relu(self.fc(x))))


def a_millisecond(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    """Stand for torch's roofline, which needs a GPU."""
    return func(*args, **(kwargs or {})), 1.0


def both(model: nn.Module, batch: torch.Tensor) -> tuple[dict[str, Any], dict[str, SACStats]]:
    """Return the statistics by torch's estimator and by ours."""
    cost_model = mock.patch.object(
        torch_runtimes.RuntimeEstimator, "_roofline_estimate", staticmethod(a_millisecond)
    )
    with cost_model:
        theirs = torchs.SACEstimator()
        with theirs(COST_MODEL):
            model(batch).sum()
    ours = SACEstimator(device="cpu")
    with ours(COST_MODEL):
        model(batch).sum()
    return theirs.sac_mod_stats, ours.sac_mod_stats


@pytest.mark.parametrize("model", [InPlace, Tower])
def test_ops_are_listed_as_torch_lists_them(model: type[nn.Module]) -> None:
    with FakeTensorMode():
        theirs, ours = both(model(), torch.rand(10, 5 if model is InPlace else 64))
    assert list(ours) == list(theirs)
    for name, stats in theirs.items():
        found = ours[name]
        for field in ("func_names", "view_like_ops", "rand_ops", "inplace_ops"):
            assert getattr(found, field) == getattr(stats, field), (name, field)
        # torch goes by the addresses of storages, which others may get later: it may see more of them saved.
        assert set(found.saved_autograd_ops) <= set(stats.saved_autograd_ops), name
        assert found.force_store_random == stats.force_store_random
        # On purpose: an operator that overwrites makes nothing; torch counts the storage once more.
        overwriting = dict(stats.inplace_ops)
        expected = [0 if number in overwriting else size for number, size in enumerate(stats.memory)]
        assert found.memory == expected, name


def test_in_place_ops_and_views_of_a_small_model() -> None:
    with FakeTensorMode():
        estimator = SACEstimator(device=DEVICE)
        with estimator(COST_MODEL):
            loss = InPlace()(torch.rand(10, 5)).sum()
        loss.backward()
    stats = estimator.sac_mod_stats["InPlace"]
    assert stats.view_like_ops == [0]
    assert stats.rand_ops == []
    assert stats.inplace_ops == [(2, 1), (3, 1), (4, 1)]


def test_what_autograd_saves_of_a_block() -> None:
    """By hand: both weights, the input of the second product, and what dropout makes: mask and result."""
    with FakeTensorMode():
        estimator = SACEstimator(device=DEVICE)
        with estimator(COST_MODEL):
            Tower(depth=1)(torch.rand(16, 64, requires_grad=True)).sum()
    stats = estimator.sac_mod_stats["Tower.blocks.0"]
    saved = [stats.func_names[op] for op in stats.saved_autograd_ops]
    assert stats.func_names == [
        "t",
        "addmm",
        "relu",
        "t",
        "addmm",
        "native_dropout",
        "native_layer_norm",
        "add",
    ]
    assert saved == ["t", "relu", "t", "native_dropout"]


def test_attention_draws_only_for_dropout() -> None:
    drawn = []
    for dropout in (0.0, 0.1):
        with FakeTensorMode():
            model = Transformer(Shape(1, 4, 64, 128, 32, dropout))
            estimator = SACEstimator(device=DEVICE)
            with estimator(COST_MODEL):
                model(torch.zeros(2, 32, dtype=torch.int64))
        stats = estimator.sac_mod_stats["Transformer.layers.0.attention"]
        drawn.append([stats.func_names[op] for op in stats.rand_ops])
    assert drawn[0] == []
    assert drawn[1] == ["_scaled_dot_product_efficient_attention", "native_dropout"]


def test_what_must_go_together_goes_together() -> None:
    """By hand: a forced op, three alone, two random ones, an overwritten pair, and a view."""
    stats = SACStats(
        func_names=["copy_", "add", "rand", "mm", "rand", "linear", "t", "relu_"],
        runtimes=[5.0, 5.0, 1.0, 15.0, 2.0, 9.0, 1.0, 5.0],
        memory=[0, 100, 30, 120, 60, 140, 0, 0],
        view_like_ops=[6],
        rand_ops=[2, 4],
        saved_autograd_ops=[],
        inplace_ops=[(0, 0), (7, 5)],
        force_store_random=False,
    )
    order = greedy_order_of(stats)
    assert order.stored_ops == {0}
    assert order.recomputed_ops == {6}
    assert order.inplace_op_groups == {0: {0}, 5: {5, 7}}
    assert order.random_ops_group == {2: {2, 4}}
    found = [(one.op_idx, one.memory, one.runtime, one.msps) for one in order.msps_meta]
    assert found == [(2, 90, 3.0, 30.0), (1, 100, 5.0, 20.0), (5, 140, 14.0, 10.0), (3, 120, 15.0, 8.0)]

    stats.force_store_random = True
    order = greedy_order_of(stats)
    assert order.stored_ops == {0, 2}
    assert [one.op_idx for one in order.msps_meta] == [1, 5, 3]


def trade_off_by_brute_force(points: list[tuple[float, float]], lines: int) -> float:
    """Return the smallest squared distance of so many lines between points to all points."""
    best = float("inf")
    for inner in itertools.combinations(range(1, len(points) - 1), lines - 1):
        chosen = [points[place] for place in (0, *inner, len(points) - 1)]
        distance = 0.0
        for x, y in points:
            (left, low), (right, high) = next(
                pair for pair in itertools.pairwise(chosen) if pair[0][0] <= x <= pair[1][0]
            )
            distance += (low + (high - low) * (x - left) / (right - left) - y) ** 2
        best = min(best, distance)
    return best


@pytest.mark.parametrize("lines", [1, 2, 3])
def test_lines_are_the_best_between_points_of_the_curve(lines: int) -> None:
    with FakeTensorMode():
        estimator = SACEstimator(device=DEVICE)
        with estimator(COST_MODEL):
            Tower(depth=2)(torch.rand(4096, 64))
    estimator.pwlf_sac_tradeoff_curve(n_segments=lines)
    found = estimator.sac_mod_tradeoff_stats["Tower"]
    points = list(found.tradeoff_curve.items())
    assert (
        found.n_segments == len(found.slopes) == len(found.intercepts) == len(found.fit_breaks) - 1 == lines
    )
    assert found.slopes == sorted(found.slopes)  # convex: later ops free less per millisecond

    def height(share: float) -> float:
        return max(s * share + i for s, i in zip(found.slopes, found.intercepts))

    distance = sum((height(x) - y) ** 2 for x, y in points)
    assert distance == pytest.approx(trade_off_by_brute_force(points, lines))
    assert all(height(x) >= y - 1e-12 for x, y in points)
    stats = estimator.sac_mod_stats["Tower"]
    assert (found.sac_memory, found.sac_runtime) == (sum(stats.memory), sum(stats.runtimes))


class Views(nn.Module):
    """Only looks at its input differently."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Flatten()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).t()


class Nothing(nn.Module):
    """Has a module inside, and no operators at all."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class OnAClone(nn.Module):
    """Overwrites a copy of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.clone().mul_(2)) * x


@pytest.mark.parametrize("kind", [Views, Nothing, OnAClone])
def test_modules_that_torch_fails_on(kind: type[nn.Module]) -> None:
    with FakeTensorMode():
        model, batch = kind(), torch.rand(4, 2, 8, requires_grad=True)
        estimator = SACEstimator(device=DEVICE)
        for _ in range(2):  # torch's cannot be entered twice either
            with estimator(COST_MODEL):
                model(batch)
    estimator.pwlf_sac_tradeoff_curve()
    found = estimator.sac_mod_tradeoff_stats[kind.__name__]
    if kind is OnAClone:
        assert estimator.sac_mod_stats["OnAClone"].inplace_ops == [(1, 0)]
    else:
        assert (found.n_segments, found.slopes, found.intercepts, found.sac_memory) == (1, [0.0], [0.0], 0)


@pytest.mark.parametrize("model", [Wrapped(), Twice()])
def test_dataclasses_and_shared_modules(model: nn.Module) -> None:
    estimator = SACEstimator(device=DEVICE)
    with estimator(COST_MODEL):
        model(torch.ones(2, 16))
    estimator.pwlf_sac_tradeoff_curve()
    assert type(model).__name__ in estimator.sac_mod_tradeoff_stats


def test_tables_are_printed_as_torchs(capsys: pytest.CaptureFixture[str]) -> None:
    """The same statistics, once through torch's display."""
    with FakeTensorMode():
        estimator = SACEstimator(device=DEVICE)
        with estimator(COST_MODEL):
            Tower(depth=1)(torch.rand(16, 64))
    estimator.display_modulewise_sac_stats(depth=3)
    ours = capsys.readouterr().out.splitlines()
    theirs = torchs.SACEstimator()
    theirs.sac_mod_stats = estimator.sac_mod_stats
    theirs.sac_mod_greedy_order_meta = estimator.sac_mod_greedy_order_meta
    theirs.display_modulewise_sac_stats(depth=3)
    assert ours == capsys.readouterr().out.splitlines()


def estimated() -> SACEstimator:
    with FakeTensorMode():
        estimator = SACEstimator(device=DEVICE)
        with estimator(COST_MODEL):
            Tower(depth=1)(torch.rand(16, 64))
    return estimator


def test_without_the_packages_for_tables_and_drawings_a_message_names_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    estimator = estimated()
    for package in ("tabulate", "matplotlib"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match="pip install tabulate"):
        estimator.display_modulewise_sac_stats(print_tabular=True)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        estimator.pwlf_sac_tradeoff_curve(save_tradeoff_graphs=True)


def test_trade_offs_are_drawn_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a stand-in for matplotlib, whose second drawing fails halfway."""
    saved: list[str] = []

    def save(path: str, format: str) -> None:
        saved.append(path)
        Path(path).write_text(format)
        if len(saved) == 2:
            raise OSError("the disk is full")

    pyplot = mock.MagicMock()
    pyplot.subplots.return_value = (mock.MagicMock(savefig=save), mock.MagicMock())
    monkeypatch.setitem(sys.modules, "matplotlib", mock.MagicMock())
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", pyplot)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match="full"):
        estimated().pwlf_sac_tradeoff_curve(save_tradeoff_graphs=True)
    assert [file.name for file in (tmp_path / "tradeoff_graphs").iterdir()] == ["Tower.blocks.0.png"]


def test_mistakes_are_refused() -> None:
    with pytest.raises(NotImplementedError):
        SACEstimator()("by hand")
    estimator = SACEstimator(device=DEVICE)
    with pytest.raises(ValueError, match="at least 1"):
        estimator.pwlf_sac_tradeoff_curve(n_segments=0)
    empty = SACStats([], [], [], [], [], [], [], force_store_random=False)
    assert fitted(empty, greedy_order_of(empty), 2).fit_breaks == [0.0, 1.0]


def test_a_captured_step_has_the_same_ops() -> None:
    def build() -> Step:
        return Step.of(Tower(64, 2), torch.randn(32, 64), loss=torch.sum)

    captured = SACEstimator.of(CapturedStep(build, device=DEVICE))
    with FakeTensorMode():
        observed = SACEstimator(device=DEVICE)
        with observed(COST_MODEL):
            Tower(64, 2)(torch.randn(32, 64))
    assert list(captured.sac_mod_stats) == list(observed.sac_mod_stats)
    for name, stats in captured.sac_mod_stats.items():
        assert stats.func_names == observed.sac_mod_stats[name].func_names
        assert stats.memory == observed.sac_mod_stats[name].memory
