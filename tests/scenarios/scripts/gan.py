"""A DCGAN: discriminator and generator take turns, each with its own Adam."""

import torch
from torch import nn

import trainfit


def generator(latent: int) -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(latent, 32, 4, 1, 0, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(True),
        nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(True),
        nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False),
        nn.Tanh(),
    )


def discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(16, 32, 4, 2, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(32, 1, 4, 1, 0, bias=False),
        nn.Flatten(0),
    )


def build(batch: int = 8, device: str = "cpu") -> trainfit.Step:
    make, judge = generator(24).to(device), discriminator().to(device)
    make_optimizer = torch.optim.Adam(make.parameters(), lr=2e-4, betas=(0.5, 0.999))
    judge_optimizer = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    real = torch.randn(batch, 3, 16, 16, device=device)

    def run() -> torch.Tensor:
        judge.zero_grad()
        real_loss = criterion(judge(real), torch.ones(batch, device=device))
        real_loss.backward()
        noise = torch.randn(batch, 24, 1, 1, device=device)
        fake = make(noise)
        fake_loss = criterion(judge(fake.detach()), torch.zeros(batch, device=device))
        fake_loss.backward()
        judge_optimizer.step()

        make.zero_grad()
        fool_loss = criterion(judge(fake), torch.ones(batch, device=device))
        fool_loss.backward()
        make_optimizer.step()
        return fool_loss

    return trainfit.Step(nn.ModuleList([make, judge]), [make_optimizer, judge_optimizer], run)
