"""A script that never trains is no simulation.

run: --world-size 2
exit: 1
says: rank 0: the script ended after 0 optimizer step(s)
"""

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
model = torch.nn.Linear(4, 4).cuda()
model(torch.randn(2, 4, device="cuda")).sum().backward()
dist.all_reduce(model.weight.grad)
