"""Only rank 5 fails.

run: --world-size 8 --trace-ranks all
exit: 1
says: Traceback (most recent call last)
says: raise ValueError("bad luck")
says: echo-launch: rank 5: ValueError: bad luck
"""

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    if dist.get_rank() == 5:
        raise ValueError("bad luck")
    model(torch.randn(2, 4, device="cuda")).sum().backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
