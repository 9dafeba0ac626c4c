"""Case 92: rank 2 has eight batches, the others four: it is alone in the gradients' reduce of the fifth.

run: --world-size 4 --trace-ranks all --steps 7
exit: 3
says: ranks 0-1,3 never make
says: rank 2 wait
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
model = DistributedDataParallel(torch.nn.Linear(64, 64).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = 8 if rank == 2 or "fixed" in sys.argv else 4
for _ in range(batches):
    model(torch.randn(2, 64, device="cuda")).sum().backward()  # named
    optimizer.step()
    optimizer.zero_grad()
