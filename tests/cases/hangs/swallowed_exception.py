"""Case 100: one rank raises, swallows the exception, and with it leaves a reduce out; its next one meets it.

run: --world-size 4 --trace-ranks all
exit: 3
fixed: fixed
says: call #2 on group 0 (world, ranks 0-3) does not match: ranks 0-1,3 call all_reduce (sum) of 4 bytes float32
says: rank 2 calls all_reduce (sum) of 16384 bytes float32
says: before it, rank 2 called all_reduce (sum) of 16384 bytes float32
"""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    loss = model(torch.randn(2, 64, device="cuda")).sum()
    loss.backward()
    dist.all_reduce(model.weight.grad)
    dist.all_reduce(model.bias.grad)
    try:
        if rank == 2 and "fixed" not in sys.argv:
            raise ValueError("a sample without labels")
        dist.all_reduce(loss.detach())  # named
    except ValueError as error:
        print("skipped:", error)
    optimizer.step()
    torch.cuda.synchronize()
