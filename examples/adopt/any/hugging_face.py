"""Hugging Face's Trainer trains a small GPT-2 whose head is not tied to its table, and not by the fused AdamW."""

from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import rowcast

WORDS = 1500


def main(capacity: str, optim: str = "adamw_torch") -> dict[str, Any]:
    torch.manual_seed(0)
    texts = (torch.rand(200, 12) ** 2 * WORDS).long()
    data = [{"input_ids": text, "labels": text} for text in texts]
    sizes = {"vocab_size": WORDS, "n_positions": 12, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None))
    if capacity:
        rowcast.adopt(model, capacity)
    with TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            optim=optim,
            num_train_epochs=2,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model, settings, train_dataset=data)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "model": model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
