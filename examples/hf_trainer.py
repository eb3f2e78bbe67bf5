"""Hugging Face's Trainer with a plan: a small Llama with random weights, trained for real on this machine.

python examples/hf_trainer.py

The plan is made for 60 % of the memory that the step needs without one. Then the Trainer trains twice,
without a plan and with `PlanCallback`, and the step is measured both ways. Nothing is downloaded.
"""

from __future__ import annotations

import tempfile

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import trainfit

STEPS = 8
BATCH = 8
SEQ = 64
WORDS = 512


def make_model() -> LlamaForCausalLM:
    """Make the model, with the same random weights each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


class Sentences(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Sequences in which every word follows from the one before."""

    def __len__(self) -> int:
        """Return how many there are."""
        return STEPS * BATCH

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        """Return one as the model takes it."""
        words = (torch.arange(SEQ) * 3 + number) % WORDS
        return {"input_ids": words, "labels": words}


def build() -> trainfit.Step:
    """Build the step that the Trainer runs, to plan and measure it."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    words = torch.randint(0, WORDS, (BATCH, SEQ))

    def run() -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=words, labels=words).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model=model, optimizer=optimizer, run=run)


def train(*callbacks: TrainerCallback) -> tuple[list[float], LlamaForCausalLM]:
    """Train, and return the loss of each step and the trained model."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            learning_rate=1e-3,
            num_train_epochs=1,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(make_model(), arguments, train_dataset=Sentences(), callbacks=list(callbacks))
        trainer.remove_callback(PrinterCallback)  # the losses are printed below, side by side
        trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], trainer.model


def main() -> None:
    """Plan, train without and with the plan, and measure."""
    trace = trainfit.capture(build)
    needed = trainfit.estimate(trace).peak_bytes
    plan = trainfit.plan(trace, budget=needed * 6 // 10)
    added = plan.added_seconds / plan.baseline_step_seconds
    print(f"without a plan the step needs {mebibytes(needed)} (predicted)")
    print(f"the plan needs {mebibytes(plan.peak_bytes)} and adds {added:.1%} to its time (predicted)\n")

    losses, model = train()
    planned_losses, planned_model = train(trainfit.PlanCallback(plan))
    print("step   loss without   loss with plan")
    for step, (loss, planned_loss) in enumerate(zip(losses, planned_losses), start=1):
        print(f"{step:4}   {loss:12.6f}   {planned_loss:14.6f}")
    same = losses == planned_losses and all(map(torch.equal, model.parameters(), planned_model.parameters()))
    print(f"losses and trained weights are {'the same, bit by bit' if same else 'different'}\n")

    result = trainfit.verify(build, plan=plan, costs="roofline")
    assert result.comparison is not None
    print(f"measured peak of a step without the plan   {mebibytes(result.comparison.baseline.peak_bytes)}")
    print(f"measured peak of a step with the plan      {mebibytes(result.measured.peak_bytes)}")


def mebibytes(size: int) -> str:
    """Write a number of bytes for people."""
    return f"{size / 2**20:.1f} MiB"


if __name__ == "__main__":
    main()
