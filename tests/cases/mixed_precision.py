"""fp16 with a GradScaler, activation checkpointing, torch.compile, and a copy of the weights kept as moving average."""

import copy
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

dist.init_process_group()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(3)
        )
        self.head = torch.nn.Linear(64, 64)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


model = Net().to(device)
average = copy.deepcopy(model).requires_grad_(False)
parallel = DistributedDataParallel(torch.compile(model), device_ids=[device.index], gradient_as_bucket_view=True)
decay, rest = [], []
for p in parallel.parameters():
    (decay if p.dim() > 1 else rest).append(p)
optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=1e-3)
scaler = torch.amp.GradScaler("cuda")

for _ in range(20):
    x = torch.randn(4, 16, 64, device=device)
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.float16):
        loss = (parallel(x) - x).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        for mine, theirs in zip(average.parameters(), model.parameters()):
            mine.lerp_(theirs, 0.01)
    if not torch.isfinite(loss):
        raise RuntimeError("the loss is not finite")
dist.destroy_process_group()
