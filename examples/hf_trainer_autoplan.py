"""Hugging Face's Trainer makes its own plan: no plan file, no step written down a second time.

python examples/hf_trainer_autoplan.py

A small Llama with random weights is trained for real on this machine, without the callback and with it. The
callback gets a budget of 70 % of what the step needs, as if that were all the memory that there is; on a GPU
leave the budget out, and what is free decides. The callback says on standard error what it has done. Nothing
is downloaded.
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

STEPS = 4
BATCH = 8
SEQ = 64
WORDS = 256


class Sentences(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Sequences in which every word follows from the one before."""

    def __len__(self) -> int:
        """Return how many there are."""
        return STEPS * BATCH

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        """Return one as the model takes it."""
        words = (torch.arange(SEQ) * 3 + number) % WORDS
        return {"input_ids": words, "labels": words}


def train(*callbacks: TrainerCallback) -> tuple[list[float], LlamaForCausalLM]:
    """Train, and return the loss of each step and the trained model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
        use_cache=False,
    )
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
        model = LlamaForCausalLM(config)
        trainer = Trainer(model, arguments, train_dataset=Sentences(), callbacks=list(callbacks))
        trainer.remove_callback(PrinterCallback)  # the losses are printed below, side by side
        trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], trainer.model


def main() -> None:
    """Train without the callback, with memory enough, and with too little."""
    losses, model = train()

    roomy = trainfit.PlanCallback()
    train(roomy)
    assert roomy.result is not None

    tight = trainfit.PlanCallback(budget=roomy.result.needed_bytes * 7 // 10)
    planned_losses, planned_model = train(tight)

    print("step   loss without   loss with plan")
    for step, (loss, planned_loss) in enumerate(zip(losses, planned_losses), start=1):
        print(f"{step:4}   {loss:12.6f}   {planned_loss:14.6f}")
    same = losses == planned_losses and all(map(torch.equal, model.parameters(), planned_model.parameters()))
    print(f"losses and trained weights are {'the same, bit by bit' if same else 'different'}")


if __name__ == "__main__":
    main()
