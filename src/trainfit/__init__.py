"""trainfit: does a PyTorch training step fit, how long does it take, how to make it fit."""

from trainfit.step import Step

__all__ = ["Step"]
