"""Rank 0 reduces where rank 1 broadcasts, in every training step.

run: --world-size 2
exit: 3
says: all_reduce
says: broadcast
"""

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.randn(2, 4, device="cuda")).sum().backward()
    if dist.get_rank() == 0:
        dist.all_reduce(model.weight.grad)  # named
    else:
        dist.broadcast(model.weight.grad, 0)  # named
    optimizer.step()
