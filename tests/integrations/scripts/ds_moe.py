"""A mixture of experts under DeepSpeed's MoE layer."""

import argparse

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--ep", type=int, default=2)
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
deepspeed.init_distributed()
HIDDEN, EXPERTS = 64, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(128, HIDDEN)
        expert = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.ReLU(), nn.Linear(4 * HIDDEN, HIDDEN))
        self.moe = MoE(HIDDEN, expert=expert, num_experts=EXPERTS, ep_size=args.ep, k=1, min_capacity=0)
        self.head = nn.Linear(HIDDEN, 128)

    def forward(self, tokens):
        x = self.embedding(tokens)
        y, balance, _ = self.moe(x)
        return self.head(x + y), balance


model = Model()
config = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    "gradient_clipping": 1.0,
}
parameters = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
for _ in range(100):
    tokens = torch.randint(128, (2, 33), device=engine.device)
    logits, balance = engine(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    engine.backward(loss + 0.01 * balance)
    engine.step()
