"""A training loop whose step time the device decides: large layers, few launches."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train(steps: int = 4) -> None:
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4))).cuda()
    model = DDP(model, device_ids=[local])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    data = torch.randn(8192, 4096, device="cuda")
    for _ in range(steps):
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
