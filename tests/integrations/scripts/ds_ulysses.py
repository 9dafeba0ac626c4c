"""Attention over a sequence that is sharded over ranks (DeepSpeed-Ulysses)."""

import argparse

import deepspeed
import deepspeed.runtime.sequence_parallel.parallel_state_sp as parallel_state
import torch
from deepspeed.sequence.layer import DistributedAttention
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--sp", type=int, default=2)
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
deepspeed.init_distributed()
parallel_state.initialize_sequence_parallel(args.sp)
HIDDEN, HEADS = 64, 4


def attention(query, key, value, *_, **__):
    heads = (x.transpose(1, 2) for x in (query, key, value))
    return nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(128, HIDDEN)
        self.qkv, self.out, self.head = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 128)
        group = parallel_state.get_sequence_parallel_group()
        self.attention = DistributedAttention(attention, group, scatter_idx=2, gather_idx=1)

    def forward(self, tokens):
        x = self.embedding(tokens)
        batch, length, _ = x.shape
        query, key, value = (y.view(batch, length, HEADS, HIDDEN // HEADS) for y in self.qkv(x).chunk(3, -1))
        return self.head(x + self.out(self.attention(query, key, value, 0).reshape(batch, length, HIDDEN)))


model = Model()
config = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, mpu=parallel_state)
for _ in range(100):
    tokens = torch.randint(128, (2, 33), device=engine.device)
    logits = engine(tokens[:, :-1]).float()
    engine.backward(nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
    engine.step()
