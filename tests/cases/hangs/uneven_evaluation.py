"""Case 93: the evaluation of sharded parameters runs to the end of each rank's own data: 3 batches here, 5 there.

run: --world-size 2
exit: 3
fixed: fixed
says: does not match: rank 0 calls all_reduce (sum) of 4 bytes float32
says: rank 1 calls all_gather of 16640 bytes float32
says: in FSDPSequential.0
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(2))).cuda()
for part in (*model, model):
    fully_shard(part)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = 3 if rank == 0 or "fixed" in sys.argv else 5
for _ in range(4):
    model(torch.randn(2, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    total = torch.zeros(1, device="cuda")
    with torch.no_grad():
        for _ in range(batches):
            total += model(torch.randn(2, 64, device="cuda")).sum()  # named
    dist.all_reduce(total)  # named
