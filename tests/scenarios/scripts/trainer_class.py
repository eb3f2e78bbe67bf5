"""A Trainer class with a config dataclass, argparse for the command line, callbacks, state in attributes."""

import argparse
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

import trainfit


@dataclass
class Config:
    widths: list[int] = field(default_factory=lambda: [48, 96, 48])
    lr: float = 3e-4
    batch: int = 16
    clip: float | None = 1.0


class Trainer:
    def __init__(self, config: Config, device: str) -> None:
        self.config, self.device = config, torch.device(device)
        pairs = zip(config.widths[:-1], config.widths[1:])
        self.model = nn.Sequential(*[nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairs]).to(
            self.device
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, step / 10))
        self.history: list[float] = []
        self.callbacks = [lambda trainer: trainer.history.append(trainer.last_loss)]

    def batch(self) -> torch.Tensor:
        return torch.randn(self.config.batch, self.config.widths[0], device=self.device)

    def train_step(self) -> float:
        self.model.train()
        inputs = self.batch()
        loss = F.smooth_l1_loss(self.model(inputs), inputs)
        self.optimizer.zero_grad()
        loss.backward()
        if self.config.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.scheduler.step()
        self.last_loss = loss.item()
        for callback in self.callbacks:
            callback(self)
        return self.last_loss


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--batch-size", type=int, default=16)
    return parser.parse_args()


def build(device: str = "cpu") -> trainfit.Step:
    arguments = parse()
    trainer = Trainer(Config(lr=arguments.lr, batch=arguments.batch_size), device)
    return trainfit.Step(trainer.model, trainer.optimizer, trainer.train_step)
