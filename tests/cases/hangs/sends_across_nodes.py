"""Case 97: both stages send before they receive: it runs for as long as what they send fits the library's buffers.

run: --nnodes 2 --nproc-per-node 1
exit: 3
fixed: ordered
unsafe: small
says: ranks 0-1 wait for each other in a circle
says: send of 67108864 bytes
"""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(0)
width = 128 if "small" in sys.argv else 4096  # float32 squares of 64 KiB or 64 MiB
model = torch.nn.Linear(width, width).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
other = torch.empty_like(model.weight)
first, second = (dist.recv, dist.send) if "ordered" in sys.argv and rank == 1 else (dist.send, dist.recv)
for _ in range(4):
    model(torch.randn(2, width, device="cuda")).sum().backward()
    for _stage in range(2):
        first(model.weight.grad if first is dist.send else other, 1 - rank)  # named
        second(other if second is dist.recv else model.weight.grad, 1 - rank)
    optimizer.step()
