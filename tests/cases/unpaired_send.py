"""Rank 0 sends 16 MB, more than any buffer holds, and rank 1 never receives it.

run: --world-size 2
exit: 3
says: send
says: rank 0
"""

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
model = torch.nn.Linear(2048, 2048).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.randn(2, 2048, device="cuda")).sum().backward()
    if dist.get_rank() == 0:
        dist.send(model.weight.grad, 1)  # named
    optimizer.step()
    torch.cuda.synchronize()
