"""DistributedDataParallel in the modes that change what it communicates."""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--mode")
mode = parser.parse_args().mode

dist.init_process_group("gloo")
torch.manual_seed(0)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(6))
        self.unused = torch.nn.Linear(256, 256)
        self.norm = torch.nn.BatchNorm1d(256)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


options = {
    "static": dict(static_graph=True),
    "unused": dict(find_unused_parameters=True),
    "view": dict(gradient_as_bucket_view=True, find_unused_parameters=True),
    "fp16": dict(find_unused_parameters=True),
    "no-sync": dict(find_unused_parameters=True),
}[mode]
model = DistributedDataParallel(Model(), bucket_cap_mb=0.6, **options)
if mode == "fp16":
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for i in range(4):
    model.require_backward_grad_sync = not (mode == "no-sync" and i % 2 == 0)
    model(torch.randn(4, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
