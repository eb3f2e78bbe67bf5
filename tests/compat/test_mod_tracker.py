"""`ModTracker`: the same names at the same moments as torch's, and what torch's does not follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import Twice, Wrapped
from torch import nn
from torch.distributed._tools.mod_tracker import ModTracker as TorchModTracker
from torch.utils.checkpoint import checkpoint

from trainfit.compat.mod_tracker import ModTracker

Seen = list[tuple[Any, ...]]


def hierarchy(kind: type) -> Seen:
    """Note which modules run, in forward and when a gradient passes, in two iterations."""
    seen: Seen = []

    class Square(nn.Module):
        def forward(self, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            value = x["a"].relu_()
            seen.append((frozenset(tracker.parents), tracker.is_bw))
            value.register_hook(lambda _: seen.append((frozenset(tracker.parents), tracker.is_bw)))
            return {"a": value @ value}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = Square()
            self.b = nn.ModuleDict({"nest": Square()})
            self.c = nn.ModuleList([Square()])

        def forward(self, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return self.b["nest"](self.a(self.c[0](x)))

    net = Net()
    with kind() as tracker:
        for _ in range(2):
            net({"a": torch.randn(4, 4, requires_grad=True).clone()})["a"].sum().backward()
    return seen


def hooks(kind: type, run: Callable[[ModTracker], None]) -> Seen:
    """Note what the user's hooks see."""
    tracker = kind()
    seen: Seen = []

    def note(what: str) -> Callable[..., None]:
        def hook(module: nn.Module | None, *_: Any) -> None:
            name = None if module is None else tracker.get_known_fqn(module)
            seen.append((what, name, name in tracker.parents, tracker.is_bw))

        return hook

    tracker.register_user_hooks(note("pre_fw"), note("post_fw"), note("pre_bw"), note("post_bw"))
    run(tracker)
    return seen


class Bar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.foo = nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.foo(x).relu_()


def one_step(tracker: ModTracker) -> None:
    with tracker:
        Bar()(torch.rand(10, 10, requires_grad=True)).sum().backward()


def a_module_that_is_gone(tracker: ModTracker) -> None:
    with tracker:
        model = Bar()
        loss = model(torch.rand(10, 10, requires_grad=True)).sum()
        del model
        loss.backward()


def checkpointed(tracker: ModTracker) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linears[0](x).relu()
            return checkpoint(self.linears[1], x, use_reentrant=False).relu()

    with tracker:
        Net()(torch.randn(2, 8)).sum().backward()


def test_modules_that_run_are_those_that_torch_names() -> None:
    found = hierarchy(ModTracker)
    assert found == hierarchy(TorchModTracker)
    assert found[0] == ({"Global", "Net", "Net.c.0"}, False)
    assert found[3] == ({"Global", "Net", "Net.b.nest"}, True)


@pytest.mark.parametrize("run", [one_step, a_module_that_is_gone, checkpointed])
def test_hooks_are_called_when_torchs_are(run: Callable[[Any], None]) -> None:
    found = hooks(ModTracker, run)
    assert found == hooks(TorchModTracker, run)
    assert {name for name, *_ in found} == {"pre_fw", "post_fw", "pre_bw", "post_bw"}


def test_nothing_runs_after_backward() -> None:
    with ModTracker() as tracker:
        nn.Linear(2, 2)(torch.rand(2, requires_grad=True)).sum().backward()
        assert not tracker.is_bw
        assert tracker.parents == {"Global"}


def test_there_is_one_hook_of_each_kind() -> None:
    tracker = ModTracker()
    tracker.register_user_hooks(pre_fw_hook=print)
    tracker.register_user_hooks(post_fw_hook=print)
    with pytest.raises(AssertionError, match="pre_fw_hook already"):
        tracker.register_user_hooks(pre_fw_hook=print)
    tracker.clear_user_hooks()
    tracker.register_user_hooks(pre_fw_hook=print)


def test_a_model_that_returns_a_dataclass_has_a_backward() -> None:
    """torch finds no tensors in it, and never begins."""
    model = Wrapped()

    def run(tracker: ModTracker) -> None:
        with tracker:
            model(torch.rand(2, 16)).logits.sum().backward()

    assert ("pre_bw", "Wrapped", True, True) in hooks(ModTracker, run)
    assert ("pre_bw", "Wrapped", True, True) not in hooks(TorchModTracker, run)


def test_a_shared_module_has_its_first_name_and_keyword_inputs_end_backward() -> None:
    model = Twice()
    tracker = ModTracker()
    with tracker:
        model(x=torch.rand(2, 16, requires_grad=True)).sum().backward()
    assert tracker.get_known_fqn(model.second) == "Twice.first"
    assert tracker.get_known_fqn(nn.Linear(1, 1)) is None


def test_an_error_in_a_module_leaves_nothing_running() -> None:
    class Broken(nn.Module):
        def forward(self) -> None:
            raise ValueError("broken")

    with ModTracker() as tracker:
        with pytest.raises(ValueError, match="broken"):
            Broken()()
        assert tracker.parents == {"Global"}
