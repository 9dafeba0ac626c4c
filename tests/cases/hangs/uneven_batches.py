"""Case 92: rank 2 has eight batches, the others four: it is alone in the gradients' reduce of the fifth.

run: --world-size 4 --trace-ranks all --steps 7
exit: 3
fixed: fixed
says: ranks 0-1,3 never make call #9 on group 0 (world, ranks 0-3), all_reduce (sum) of 16640 bytes float32
says: after 4 optimizer steps, in which rank 2 waits; rank 0 makes 9 calls there
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
