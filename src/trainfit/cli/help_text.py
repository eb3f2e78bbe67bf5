"""What `trainfit --help` says before it lists the commands."""

from __future__ import annotations

HELP = """Does a PyTorch training step fit, and how long does it take, before a GPU is rented?

The step runs a few times on tensors without memory: nothing is computed or
allocated. Its memory is predicted byte by byte and its time op by op.

[bold]Start here[/bold]

  trainfit estimate gpt2 --batch 8 --device a100-40gb   a built-in model
  trainfit estimate train.py:build --device h100        your own step
  trainfit fit gpt2 --batch 32 --device rtx-4090        what to change
  trainfit plan gpt2 --batch 8 --budget 8GiB -o p.json  make it fit
  trainfit max-batch gpt2 --device rtx-4090             the largest batch
  trainfit compare gpt2 --devices h100,l40s             which GPU to rent
  trainfit scale llama-3-8b --world-sizes 8..256        how many GPUs, mesh
  trainfit sweep grid.toml                              many as one table
  trainfit verify gpt2-tiny                             predicted and measured
  trainfit diff old.json new.json --max-peak 2%         what grew, for CI
  trainfit devices                                      what --device knows
  trainfit calibrate -o my-gpu.json                     this machine, measured

[bold]Your own step[/bold] is a function that returns model, optimizer and one iteration:

  def build(batch: int = 8, device: str = "cpu"):
      model = MyModel().to(device)
      optimizer = torch.optim.AdamW(model.parameters())
      def run():
          loss = model(torch.randn(batch, 512, device=device)).mean()
          loss.backward(); optimizer.step(); optimizer.zero_grad()
          return loss
      return trainfit.Step(model=model, optimizer=optimizer, run=run)

In a training script two lines run a plan: trainfit.apply(model,
trainfit.load_plan("p.json")). Exit codes: 0 done, 2 a mistake (one message),
3 nothing fits, 4 grew by more than allowed (diff).
"""
