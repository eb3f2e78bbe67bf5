"""`MemTracker`: byte for byte torch's own where it can run, and what torch's cannot follow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import Tower, Twice, Wrapped, plain
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker as TorchMemTracker
from torch.utils.checkpoint import checkpoint

from trainfit.compat.captured_step import CapturedStep
from trainfit.compat.mem_tracker import MemTracker, _MemRefType, _ModState
from trainfit.errors import TrainfitError
from trainfit.steps.step import Step
from trainfit.traces.simulate import simulate
from trainfit.workspace.profiler import profile_allocations

CPU = torch.device("cpu")


def tracked(kind: Callable[[], Any], *, fake: bool, checkpointed: bool) -> tuple[list[Any], Any]:
    """Train twice; return snapshots on the way, and those of the modules in the second step."""
    with FakeTensorMode() if fake else contextlib.nullcontext():
        model = Tower(checkpointed=checkpointed)
        optimizer = torch.optim.Adam(model.parameters(), foreach=True)
        batch = torch.randn(32, 64)
        tracker = kind()
        tracker.track_external(model, optimizer, batch)
        snapshots = []
        with tracker:
            for number in range(2):
                output = model(batch)
                snapshots.append(tracker.get_tracker_snapshot())
                output.sum().backward()
                del output
                snapshots.append(tracker.get_tracker_snapshot())
                optimizer.step()
                snapshots.append(tracker.get_tracker_snapshot())
                optimizer.zero_grad()
                snapshots.append(tracker.get_tracker_snapshot())
                if number == 0:
                    tracker.reset_mod_stats()
        modules = {}
        for stats in tracker.memory_tracking.values():
            sizes = (stats.parameter_mem, stats.buffer_mem, stats.input_mem, stats.output_mem)
            states = {
                state.value: [plain(snapshot) for snapshot in snapshots_of_state]
                for state, snapshots_of_state in stats.snapshots.items()
            }
            modules[stats.mod_fqn] = (sizes, states)
        peak = plain(tracker.get_tracker_snapshot("peak"))
    return [*map(plain, snapshots), peak], modules


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_snapshots_are_torchs_own(fake: bool, checkpointed: bool) -> None:
    ours, our_modules = tracked(MemTracker, fake=fake, checkpointed=checkpointed)
    theirs, their_modules = tracked(TorchMemTracker, fake=fake, checkpointed=checkpointed)

    *between, peak = ours
    *their_between, their_peak = theirs
    assert between == their_between
    assert peak["cpu"]["Total"] == their_peak["cpu"]["Total"]
    # On purpose: what the optimizer makes for a moment is no state of it.
    assert peak["cpu"]["Temp"] == their_peak["cpu"]["Optstate"] - peak["cpu"]["Optstate"] > 0
    assert set(our_modules) == set(their_modules)
    for name, (sizes, states) in their_modules.items():
        our_sizes, our_states = our_modules[name]
        assert our_sizes == sizes, name
        assert list(our_states) == list(states), name
        for state, snapshots in states.items():
            totals = [{device: each["Total"] for device, each in one.items()} for one in snapshots]
            found = [{device: each["Total"] for device, each in one.items()} for one in our_states[state]]
            assert found == totals, (name, state)


def test_categories_are_what_the_tensors_are() -> None:
    """Parameters, gradients and optimizer state, counted by hand after each part of a step."""
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    parameters = 4 * (2 * 128 * 256 + 256 + 128)

    def sizes() -> tuple[int, int, int]:
        found = tracker.get_tracker_snapshot()[CPU]
        return found["Parameter"], found["Gradient"], found["Optstate"]

    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        batch = torch.randn(16, 128)
        assert sizes() == (parameters, 0, 0)
        model(batch).sum().backward()
        assert sizes() == (parameters, parameters, 0)
        optimizer.step()
        assert sizes() == (parameters, parameters, 2 * parameters + 4 * 4)
        optimizer.zero_grad()
        assert sizes() == (parameters, 0, 2 * parameters + 4 * 4)
    assert tracker.get_tracker_snapshot("peak")[CPU][_MemRefType.ACT] == 16 * 128 * 4


def test_the_peak_is_that_of_the_profiler() -> None:
    def step() -> None:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    batch = torch.randn(128, 64)
    step()
    with profile_allocations() as log, log.range("step"):
        step()
    tracker = MemTracker()
    tracker.track_external(model)
    before = sum(4 * parameter.numel() for parameter in model.parameters())
    with tracker:
        step()
    # The tracker does not see what kernels allocate inside of themselves.
    assert (
        0 <= log.usage("step").peak_bytes + before - tracker.get_tracker_snapshot("peak")[CPU]["Total"] < 8192
    )


def test_on_a_named_gpu_blocks_are_rounded() -> None:
    with FakeTensorMode():
        model = nn.Linear(3, 5)
        tracker = MemTracker(device="a100-sxm-40gb")
        tracker.track_external(model)
        with tracker:
            model(torch.ones(2, 3))
    (device,) = tracker.get_tracker_snapshot()
    assert device == torch.device("cuda", 0)
    assert tracker.get_tracker_snapshot()[device]["Parameter"] == 2 * 512


def test_several_iterations_need_no_reset() -> None:
    """torch refuses the second one."""
    model = nn.Sequential(nn.Linear(4, 4))
    with MemTracker() as tracker:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
    stats = tracker.memory_tracking[model]
    assert len(stats.snapshots[_ModState.PRE_FW]) == len(stats.snapshots[_ModState.POST_BW]) == 3


def test_a_parameter_that_is_read_before_its_module_runs_counts_from_then_on() -> None:
    model = nn.Linear(4, 4)
    with MemTracker() as tracker:
        model.weight.abs()
        assert CPU not in tracker.get_tracker_snapshot()
        model(torch.ones(2, 4))
        assert tracker.get_tracker_snapshot()[CPU]["Parameter"] == 80


def test_entering_again_goes_on() -> None:
    model = nn.Linear(4, 4)
    tracker = MemTracker()
    with tracker:
        first = model(torch.ones(1000, 4))
    high = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
    del first
    with tracker, tracker:
        model(torch.ones(1, 4))
    assert tracker.get_tracker_snapshot("peak")[CPU]["Total"] < high
    assert len(tracker.memory_tracking[model].snapshots[_ModState.PRE_FW]) == 2


@pytest.mark.parametrize("model", [Wrapped(), Twice()])
def test_every_call_has_a_backward(model: nn.Module) -> None:
    """Also of a model that returns a dataclass, and of a module that is called twice."""
    with MemTracker() as tracker:
        output = model(torch.ones(2, 16))
        (output if isinstance(output, torch.Tensor) else output.logits).sum().backward()
    for stats in tracker.memory_tracking.values():
        calls = len(stats.snapshots[_ModState.PRE_FW])
        assert calls == (2 if stats.mod_fqn.startswith("Twice.first") else 1)
        # What has no operator of its own, a module that returns its input, has no backward either.
        backwards = 0 if stats.mod_fqn.startswith("Twice.last") else calls
        assert len(stats.snapshots.get(_ModState.POST_BW, ())) == backwards, stats.mod_fqn


def test_a_checkpointed_function_is_recomputed_as_activations() -> None:
    """torch books it as temporary memory, because no module says that it is recomputed."""

    def twice(x: torch.Tensor) -> torch.Tensor:
        return first(x).sin().cos()

    first = nn.Linear(64, 64)
    with MemTracker() as tracker:
        checkpoint(twice, torch.ones(256, 64, requires_grad=True), use_reentrant=False).sum().backward()
    trace = tracker.trace()
    again = [storage for op in trace.ops if op.recompute for storage in op.creates]
    assert sum(trace.storages[storage].bytes for storage in again) >= 2 * 256 * 64 * 4
    assert {trace.storages[storage].category for storage in again} == {"activation"}


def test_parameters_without_gradients_are_no_problem() -> None:
    model = nn.Linear(4, 4).requires_grad_(False)
    with MemTracker() as tracker:
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert tracker.memory_tracking[model].parameter_mem == 80


def test_an_observed_step_is_a_sound_trace() -> None:
    model = Tower(checkpointed=True)
    optimizer = torch.optim.AdamW(model.parameters())
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        for _ in range(2):
            model(torch.randn(8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    trace = tracker.trace()
    trace.check()
    assert simulate(trace).peak_bytes == tracker.get_tracker_snapshot("peak")[CPU]["Total"]


def test_in_place_writes_that_autograd_refuses_are_refused() -> None:
    with MemTracker(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        weight = torch.ones(4, requires_grad=True)
        saved = weight.exp()
        saved.mul_(2)
        saved.sum().backward()


def second_order(model: nn.Module) -> None:
    batch = torch.ones(4, 64, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
    gradient.square().sum().backward()


def per_sample(model: nn.Module) -> None:
    parameters = dict(model.named_parameters())

    def loss(given: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, given, (sample,)).sum()

    torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0), randomness="same")(
        parameters, torch.ones(8, 64)
    )


def sparse_gradients(model: nn.Module) -> None:
    nn.Embedding(100, 64, sparse=True)(torch.tensor([1, 2, 3])).sum().backward()


@pytest.mark.filterwarnings("ignore")  # of torch's tracker
@pytest.mark.parametrize("train", [second_order, per_sample, sparse_gradients])
def test_ways_to_train_that_torch_cannot_track(train: Callable[[nn.Module], None]) -> None:
    model = Tower(depth=1)
    parameters = sum(4 * parameter.numel() for parameter in model.parameters())
    for kind, works in ((MemTracker, True), (TorchMemTracker, False)):
        tracker = kind()
        tracker.track_external(model)
        with (
            tracker,
            contextlib.nullcontext() if works else pytest.raises((RuntimeError, NotImplementedError)),
        ):
            train(model)
        model.zero_grad()
        if works:
            assert tracker.get_tracker_snapshot("peak")[CPU]["Total"] > parameters


def checkpointed(model: nn.Module, reentrant: bool) -> None:
    checkpoint(model, torch.ones(4, 64, requires_grad=True), use_reentrant=reentrant).sum().backward()


def compiled(model: nn.Module, _: bool) -> None:
    torch.compile(model, backend="eager")(torch.ones(4, 64)).sum().backward()


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize("train", [checkpointed, compiled])
@pytest.mark.parametrize("reentrant", [False, True])
def test_ways_to_train_that_have_torchs_peak(train: Callable[..., None], reentrant: bool) -> None:
    peaks = []
    for kind in (MemTracker, TorchMemTracker):
        model = Tower(depth=2)
        tracker = kind()
        tracker.track_external(model)
        with tracker:
            train(model, reentrant)
        peaks.append(tracker.get_tracker_snapshot("peak")[CPU]["Total"])
    assert peaks[0] == peaks[1]


def test_a_resized_storage_counts_as_it_is() -> None:
    kept = torch.empty(1000)
    tracker = MemTracker()
    tracker.track_external(kept)
    with tracker:
        torch.ones(1)
        kept.untyped_storage().resize_(0)
        torch.ones(1)
        assert tracker.get_tracker_snapshot() == {}
        kept.untyped_storage().resize_(2000)
        torch.ones(1)
    assert tracker.get_tracker_snapshot()[CPU]["Other"] == 2000


def test_a_snapshot_is_of_this_moment_although_no_operator_ran() -> None:
    first, second = torch.empty(100), torch.empty(200)
    tracker = MemTracker()
    tracker.track_external(first)
    assert tracker.get_tracker_snapshot()[CPU]["Other"] == 400
    tracker.track_external(second)
    assert tracker.get_tracker_snapshot()[CPU]["Other"] == 1200
    del second
    assert tracker.get_tracker_snapshot()[CPU]["Other"] == 400
    with tracker:
        first.untyped_storage().resize_(40)
        assert tracker.get_tracker_snapshot()[CPU]["Other"] == 40


def test_snapshots_are_printed_as_torchs(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for kind in (MemTracker, TorchMemTracker):
        model = nn.Sequential(nn.Linear(64, 64))
        tracker = kind()
        tracker.track_external(model)
        with tracker:
            model(torch.ones(16, 64)).sum().backward()
            tracker.display_snapshot("current", units="KiB")
        tracker.display_snapshot("peak", units="B")
        tracker.display_modulewise_snapshots(depth=2, units="KiB")
        printed.append(capsys.readouterr().out)
    assert printed[0].splitlines()[:9] == printed[1].splitlines()[:9]
    assert [line for line in printed[0].splitlines() if "Total" in line or "Module" in line] == [
        line for line in printed[1].splitlines() if "Total" in line or "Module" in line
    ]


def test_nothing_tracked_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    MemTracker().display_snapshot()
    assert capsys.readouterr().out == "No memory tracked.\n"


def test_mistakes_are_refused() -> None:
    tracker = MemTracker()
    with pytest.raises(TypeError, match="not str objects"):
        tracker.track_external("model")  # type: ignore[arg-type]
    tracker.track_external(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="current or peak"):
        tracker.get_tracker_snapshot("largest")
    with pytest.raises(ValueError, match="units are one of B, KiB, MiB, GiB"):
        tracker.display_snapshot(units="MB")
    with pytest.raises(TrainfitError):
        MemTracker(device="a1000")
    with pytest.raises(TrainfitError, match="the function that builds it"):
        CapturedStep(nn.Linear(1, 1).weight)  # type: ignore[arg-type]


def test_a_captured_step_needs_no_fake_tensors() -> None:
    def build() -> Step:
        model = Tower(512, 2)
        optimizer = torch.optim.Adam(model.parameters(), foreach=True)
        return Step.of(model, torch.randn(4096, 512), loss=torch.sum, optimizer=optimizer)

    captured = CapturedStep(build, device="h100-sxm-80gb")
    tracker = MemTracker.of(captured)
    (device,) = tracker.get_tracker_snapshot("peak")
    assert device == torch.device("cuda", 0) == captured.device
    stats = tracker.memory_tracking[captured.model]
    parameters = sum(-(-4 * p.numel() // 512) * 512 for p in captured.model.parameters())
    assert stats.parameter_mem == parameters
    assert tracker.get_tracker_snapshot("peak")[device]["Total"] == _peak_without_workspaces(tracker)
    assert len(stats.snapshots[_ModState.POST_BW]) == 1
    with pytest.raises(TrainfitError, match="of a captured step"), tracker:
        pass


def _peak_without_workspaces(tracker: MemTracker) -> int:
    return max(simulate(tracker.trace()).live_bytes)
