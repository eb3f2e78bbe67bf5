"""Capture: run one training step on tensors without memory, and write down what happened as a `Trace`."""
