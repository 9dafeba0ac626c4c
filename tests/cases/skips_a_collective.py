"""Rank 1 leaves one all-reduce out: the other waits for it for ever.

run: --world-size 2
exit: 3
says: all_reduce
says: rank 0
says: group 0
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
    optimizer.step()
    torch.cuda.synchronize()
