"""A causal language model made from its configuration alone, under transformers.Trainer."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, i):
        ids = (torch.arange(32) * (i + 1)) % 128
        return {"input_ids": ids, "labels": ids}


model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=4))
args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    bf16=True,
    max_steps=100,
    logging_steps=10,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
Trainer(model=model, args=args, train_dataset=Tokens()).train()
