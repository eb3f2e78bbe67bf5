"""`FSDPMemTracker` beside torch's own, on the same steps of one rank of two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker as TorchTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from trainfit.compat.fsdp2_mem_tracker import FSDPMemTracker, _FSDPModState, _FSDPRefType
from trainfit.errors import OptionError

CPU = torch.device("cpu")
BLOCK_BYTES = 4 * (64 * 256 + 256 + 256 * 64 + 64)
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def tracked(
    kind: Any, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None, recompute: bool = False
) -> tuple[Any, nn.Module]:
    """Return the tracker of the second step of three blocks, and the model."""
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)]
    options = {} if policy is None else {"mp_policy": policy}
    for block in blocks:
        fully_shard(block, mesh=mesh, **options)
    model = nn.Sequential(*(map(Checkpointed, blocks) if recompute else blocks))
    fully_shard(model, mesh=mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    batch = torch.randn(32, 64)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    tracker = kind(model, optimizer)
    tracker.track_inputs((batch,))
    with tracker:
        step()
    return tracker, model


def by_name(snapshot: dict[torch.device, dict[Any, int]]) -> dict[str, int]:
    return {getattr(kind, "name", kind): size for kind, size in snapshot[CPU].items()}


@pytest.mark.parametrize("policy", [None, MIXED], ids=["fp32", "mixed"])
def test_snapshots_are_those_of_torch(mesh: DeviceMesh, policy: MixedPrecisionPolicy | None) -> None:
    theirs, their_model = tracked(TorchTracker, mesh, policy)
    ours, our_model = tracked(FSDPMemTracker, mesh, policy)
    compared = 0
    for one, other in zip(their_model.modules(), our_model.modules()):
        their_stats, our_stats = theirs.memory_tracking.get(one), ours.memory_tracking.get(other)
        assert (their_stats is None) == (our_stats is None)
        if their_stats is None:
            continue
        assert their_stats.mod_fqn == our_stats.mod_fqn
        found = {state.name: list(map(by_name, calls)) for state, calls in our_stats.snapshots.items()}
        expected = {state.name: list(map(by_name, calls)) for state, calls in their_stats.snapshots.items()}
        assert set(found) == set(expected)
        for state in set(found) - {"PEAK_BW", "PEAK_FW", "AFT_POST_BW"}:
            assert found[state] == expected[state], state
            compared += 1
        assert found["PEAK_FW"][0]["Total"] == expected["PEAK_FW"][0]["Total"]
        # Torch's tracker itself keeps the last gradient until it has taken this snapshot: a bias of 64.
        held = expected["AFT_POST_BW"][0]["UNSHARDED_GRAD"]
        assert held == 64 * (4 if policy is None else 2)
        assert found["AFT_POST_BW"][0]["UNSHARDED_GRAD"] == 0
        assert found["AFT_POST_BW"][0]["Total"] == expected["AFT_POST_BW"][0]["Total"] - held
    assert compared == 3 * 7


def test_the_peak_is_that_of_torch_and_says_what_gradients_are(mesh: DeviceMesh) -> None:
    theirs, ours = (
        by_name(tracked(kind, mesh)[0].get_tracker_snapshot("peak"))
        for kind in (TorchTracker, FSDPMemTracker)
    )
    assert ours["Total"] == theirs["Total"]
    assert ours["UNSHARDED_GRAD"] == BLOCK_BYTES
    assert theirs["UNSHARDED_GRAD"] == 0  # they are temporary to it until they are reduced
    assert ours["UNSHARDED_GRAD"] + ours["TEMP"] == theirs["TEMP"]
    same = set(ours) - {"UNSHARDED_GRAD", "TEMP"}
    assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}


def test_what_fsdp_adds_is_as_large_as_it_should_be(mesh: DeviceMesh) -> None:
    tracker, model = tracked(FSDPMemTracker, mesh)
    stats = tracker.memory_tracking[model[1]]
    gathered = by_name(stats.snapshots[_FSDPModState.AFT_PRE_FW][0])
    assert gathered["SHARDED_PARAM"] == 3 * BLOCK_BYTES // 2
    assert gathered["UNSHARDED_PARAM"] == gathered["ALL_GATHER"] == BLOCK_BYTES
    resharded = by_name(stats.snapshots[_FSDPModState.AFT_POST_FW][0])
    assert resharded["UNSHARDED_PARAM"] == 0
    reduced = by_name(stats.snapshots[_FSDPModState.AFT_POST_BW][0])
    assert reduced["REDUCE_SCATTER"] == BLOCK_BYTES
    assert reduced["SHARDED_GRAD"] == 2 * BLOCK_BYTES // 2  # of the last block and of this one


def test_recomputation_has_states_of_its_own(mesh: DeviceMesh) -> None:
    tracker, model = tracked(FSDPMemTracker, mesh, recompute=True)
    snapshots = tracker.memory_tracking[model[1].inner].snapshots
    assert len(snapshots[_FSDPModState.PRE_FW_AC]) == len(snapshots[_FSDPModState.POST_FW_AC]) == 1
    assert len(snapshots[_FSDPModState.BEF_PRE_FW]) == 1


def test_snapshots_are_printed(mesh: DeviceMesh, capsys: pytest.CaptureFixture[str]) -> None:
    tracker, _ = tracked(FSDPMemTracker, mesh)
    tracker.display_snapshot("peak", units="KiB")
    tracker.display_modulewise_snapshots(depth=2, units="KiB")
    text = capsys.readouterr().out
    assert f"Unsharded Param: {BLOCK_BYTES / 1024} KiB" in text
    assert "Module:  FSDPSequential.1" in text and "Before Pre-Backward" in text
    assert [kind.value for kind in _FSDPRefType][:2] == ["Sharded Param", "Unsharded Param"]


def test_calls_can_be_forgotten(mesh: DeviceMesh) -> None:
    tracker, model = tracked(FSDPMemTracker, mesh)
    tracker.reset_mod_stats()
    assert len(tracker.memory_tracking) == 0
    with tracker:
        model(torch.randn(32, 64))
    assert len(tracker.memory_tracking[model[0]].snapshots[_FSDPModState.BEF_PRE_FW]) == 1


def test_other_models_are_refused() -> None:
    with pytest.raises(OptionError, match="this Linear is not; MemTracker follows any model"):
        FSDPMemTracker(nn.Linear(2, 2))
    with pytest.raises(OptionError, match="follows code that runs"):
        FSDPMemTracker.of(lambda: None)
