"""Trains a tiny GPT-2, made from its config, with Hugging Face's Trainer."""

import os
import pathlib

import torch
from psjobs.huggingface import Trainer
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

TEXT = pathlib.Path(os.environ.get("PSJOB_DATA") or pathlib.Path.home() / ".cache/psjobs/text") / "text.txt"
LENGTH = 64


class Windows(torch.utils.data.Dataset):
    def __init__(self, data: bytes) -> None:
        self.tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.tokens) // LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.tokens[index * LENGTH :][:LENGTH]
        return {"input_ids": window, "labels": window}


text = TEXT.read_bytes()[:400_000]
config = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
args = TrainingArguments(
    output_dir="hf_output",
    num_train_epochs=1,
    per_device_train_batch_size=8,
    learning_rate=3e-3,
    logging_steps=50,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=args, train_dataset=Windows(text[:360_000]), eval_dataset=Windows(text[360_000:]))
trainer.train()
print(f"held-out loss {trainer.evaluate()['eval_loss']:.4f}")
