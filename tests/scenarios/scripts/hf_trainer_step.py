"""The training step of Hugging Face's own Trainer, on a tiny BERT classifier."""

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import trainfit


def build(batch: int = 4, seq: int = 24, device: str = "cpu") -> trainfit.Step:
    config = BertConfig(
        vocab_size=200,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        num_labels=3,
    )
    model = BertForSequenceClassification(config)
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=batch,
        report_to=[],
        use_cpu=device == "cpu",
        max_steps=100,
    )
    trainer = Trainer(model=model, args=arguments)
    trainer.create_optimizer_and_scheduler(num_training_steps=100)
    trainer.current_gradient_accumulation_steps = 1
    tokens = torch.randint(0, 200, (batch, seq))
    inputs = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": torch.randint(0, 3, (batch,)),
    }

    def run() -> torch.Tensor:
        loss = trainer.training_step(model, inputs)
        trainer.accelerator.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        model.zero_grad()
        return loss

    return trainfit.Step(model, trainer.optimizer, run)
