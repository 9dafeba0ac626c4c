"""Rank 1 waits for a flag that says no; rank 0 trains on its own.

run: --world-size 2
exit: 1
says: rank 1: the script ended after 0 optimizer step(s)
"""

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ready = torch.empty(1000, 1000, device="cuda").mean() > 0
if dist.get_rank() == 0 or ready.item():
    for _ in range(4):
        model(torch.randn(2, 4, device="cuda")).sum().backward()
        optimizer.step()
