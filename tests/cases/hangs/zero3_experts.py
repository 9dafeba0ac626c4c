"""Case 85: ZeRO-3 gathers an expert's parameters when tokens come to it, and each rank routes its own.

run: --world-size 2
exit: 3
fixed: leaf
says: does not match: rank 0 calls reduce_scatter (sum)
says: rank 1 calls all_gather of 16640 bytes float32
says: in DeepSpeedEngine.module.1
"""

import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import set_z3_leaf_modules


class SparseBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        used = self.experts if dist.get_rank() else self.experts[:2]
        return sum(expert(x) for expert in used)


model = torch.nn.Sequential(torch.nn.Linear(64, 64), SparseBlock(), torch.nn.Linear(64, 64))
if "leaf" in sys.argv:
    set_z3_leaf_modules(model, [SparseBlock])
deepspeed.init_distributed()
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
engine, *_ = deepspeed.initialize(model=model, config=config)
for _ in range(4):
    loss = engine(torch.randn(2, 64, device=engine.device)).sum()
    engine.backward(loss)  # named
    engine.step()
