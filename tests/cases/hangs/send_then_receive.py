"""Case 96: both ranks send first and receive then; nothing holds 16 MB in between. Batched it works.

run: --world-size 2
exit: 3
fixed: batched
fixed: reversed
says: ranks 0-1 wait for each other in a circle
says: rank 0 waits in send of 16777216 bytes float32 to rank 1 (#0 in this direction) on group 0 (world, ranks 0-1)
says: rank 1 waits in send of 16777216 bytes float32 to rank 0
"""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
model = torch.nn.Linear(2048, 2048).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
halo = torch.empty_like(model.weight)
for _ in range(4):
    model(torch.randn(2, 2048, device="cuda")).sum().backward()
    if "batched" in sys.argv:
        exchange = [dist.P2POp(dist.isend, model.weight.grad, 1 - rank), dist.P2POp(dist.irecv, halo, 1 - rank)]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
    elif "reversed" in sys.argv and rank == 1:
        dist.recv(halo, 1 - rank)
        dist.send(model.weight.grad, 1 - rank)
    else:
        dist.send(model.weight.grad, 1 - rank)  # named
        dist.recv(halo, 1 - rank)
    optimizer.step()
