"""A small model under DeepSpeed's engine: whatever --config says."""

import argparse
import json

import deepspeed
import torch
from ds_block import Block
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--config", required=True)
parser.add_argument("--optimizer", default="torch")
parser.add_argument("--zero-init", action="store_true")
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
config = {"train_micro_batch_size_per_gpu": 2, **json.loads(args.config)}


class Model(nn.Module):
    def __init__(self, hidden, layers):
        super().__init__()
        self.embedding = nn.Embedding(128, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, 128)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# Before init_distributed: the world must be there already.
with deepspeed.zero.Init(config_dict_or_path=config, enabled=args.zero_init):
    model = Model(args.hidden, args.layers)
optimizer = None
if args.optimizer == "torch":
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
elif args.optimizer == "FusedAdam":
    optimizer = deepspeed.ops.adam.FusedAdam(model.parameters(), lr=1e-3)
else:
    config["optimizer"] = {"type": args.optimizer, "params": {"lr": 1e-3}}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=model.parameters(), config=config)
for _ in range(100):
    tokens = torch.randint(128, (2, 33), device=engine.device)
    logits = engine(tokens[:, :-1]).float()
    engine.backward(nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
    engine.step()
