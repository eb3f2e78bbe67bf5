"""Lightning with a plan that is made for its own first batch: the same losses, weights and counts."""

from __future__ import annotations

import subprocess
import sys
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

L = pytest.importorskip("lightning")

from trainfit.applying import runs_plan  # noqa: E402
from trainfit.applying.region import RegionCall  # noqa: E402
from trainfit.errors import BudgetTooSmall, OptionError, PlanError  # noqa: E402
from trainfit.lightning import LightningPlanCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH = 48


def part() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))


class Small(L.LightningModule):  # type: ignore[misc,name-defined]
    """Blocks that its own `training_step` calls: `forward` is not used. It logs, and it counts."""

    def __init__(self, *, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.norm = nn.ModuleList(part() for _ in range(4)), nn.BatchNorm1d(WIDTH)
        self.automatic_optimization = not manual
        self.losses: list[float] = []

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        (x,) = batch
        y = x
        for block in self.blocks:
            y = y + block(y)
        loss = (self.norm(y) - x.roll(1, 0)).square().mean()
        self.log("loss", loss)
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    "bf16": {"precision": "bf16-mixed"},
    "manual": {"manual": True},
}


def train(case: str, callbacks: list[Any]) -> tuple[Small, Any]:
    options = dict(CASES[case])
    model = Small(manual=options.pop("manual", False))
    generator = torch.Generator().manual_seed(3)
    data = torch.utils.data.TensorDataset(torch.randn(640, WIDTH, generator=generator))
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks,
            **options,
        )
        trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=160, shuffle=True))
    return model, trainer


@cache
def needed_bytes(case: str) -> int:
    callback = LightningPlanCallback()
    without, _ = train(case, [])
    with_it, _ = train(case, [callback])
    assert callback.result is not None and callback.result.fits
    assert_same(with_it, without)
    return callback.result.needed_bytes


def assert_same(one: Small, other: Small) -> None:
    assert one.losses == other.losses and len(one.losses) == 8
    assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize("case", CASES)
def test_losses_and_weights_are_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = LightningPlanCallback(budget=int(needed_bytes(case) * 0.9))
    ran: list[int] = []
    original = RegionCall.run
    monkeypatch.setattr(RegionCall, "run", lambda *args: ran.append(1) or original(*args))
    without, other = train(case, [])
    planned, trainer = train(case, [callback])
    assert callback.result is not None and callback.result.plan is not None and ran
    assert_same(planned, without)
    assert trainer.global_step == other.global_step == (4 if case == "accumulation" else 8)
    assert trainer.callback_metrics["loss"] == other.callback_metrics["loss"]
    rates = [t.lr_scheduler_configs[0].scheduler.get_last_lr() for t in (trainer, other)]
    assert rates[0] == rates[1]
    assert not runs_plan(planned)


def test_what_is_captured_is_what_runs() -> None:
    # With accumulation, gradients are there while the second batch runs forward.
    assert needed_bytes("accumulation") > needed_bytes("plain") > needed_bytes("bf16")


def test_a_plan_that_is_given_is_applied() -> None:
    made = LightningPlanCallback(budget=int(needed_bytes("plain") * 0.9))
    first, _ = train("plain", [made])
    assert made.result is not None and made.result.plan is not None
    given, seen = LightningPlanCallback(made.result.plan), []

    class Watch(L.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_end(self, trainer: Any, model: Any, *others: Any) -> None:
            seen.append(runs_plan(model))

    second, _ = train("plain", [given, Watch()])
    assert seen == [True] * 8 and given.result is None
    assert_same(second, first)


def test_what_cannot_work_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BudgetTooSmall, match=r"no plan fits into 50\.00 KiB"):
        train("plain", [LightningPlanCallback(budget="50KiB")])
    with pytest.raises(OptionError, match="give LightningPlanCallback a plan, or a budget"):
        LightningPlanCallback("plan.json", reserve="1GiB")
    with pytest.raises(PlanError, match="a plan or the name of its file, not a int"):
        LightningPlanCallback(3)  # type: ignore[arg-type]
    monkeypatch.setattr(L.Trainer, "world_size", 2)
    with pytest.raises(PlanError, match="trains with SingleDeviceStrategy here, which Lightning"):
        train("plain", [LightningPlanCallback()])


def test_without_lightning_it_says_what_to_install() -> None:
    code = """
import sys
sys.modules["lightning"] = None
import trainfit
try:
    import trainfit.lightning
except trainfit.MissingExtra as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith(
        "trainfit.lightning needs lightning, which is not installed:\n  pip install"
    )
