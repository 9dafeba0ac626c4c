"""Case 84: ZeRO-3 gathers a head's parameters whenever it is called: once on rank 0, three times on rank 1.

run: --world-size 2
exit: 3
fixed: stage1
says: does not match: rank 0 calls reduce_scatter (sum) of 49920 bytes float32
says: rank 1 calls all_gather of 16640 bytes float32
says: the script failed after calls that do not match: rank 1: RuntimeError
"""

import sys

import deepspeed
import torch
import torch.distributed as dist


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(64, 64)
        self.head_a = torch.nn.Linear(64, 64)
        self.head_b = torch.nn.Linear(64, 64)

    def forward(self, x, calls: int):
        x = self.body(x)
        y = self.head_a(x)
        for _ in range(calls):
            y = y + self.head_b(x)
        return y.sum()


deepspeed.init_distributed()
stage = 1 if "stage1" in sys.argv else 3
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
}
engine, *_ = deepspeed.initialize(model=Model(), config=config)
calls = 1 if dist.get_rank() == 0 else 3
for _ in range(4):
    loss = engine(torch.randn(2, 64, device=engine.device), calls)
    engine.backward(loss)  # named
    engine.step()
