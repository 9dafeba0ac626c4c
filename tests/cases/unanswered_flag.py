"""Nobody trains because a flag is computed from data that there is none of.

run: --world-size 2
exit: 1
says: the script ended after 0 optimizer step(s)
says: Values that Echo had to make up
"""

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
enough = torch.randn(1000, 1000, device="cuda").mean() > 0
dist.broadcast(enough, 0)
if enough.item():  # named
    for _ in range(4):
        model(torch.randn(2, 4, device="cuda")).sum().backward()
        optimizer.step()
