"""Case 99: two groups in an order of each rank's own, which is fine until some of them read a tensor in between.

run: --world-size 8 --trace-ranks all
exit: 3
says: wait for each other in a circle
says: all_to_all
says: all_reduce
says: whose host waits at a stream synchronisation
says: The others:
"""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank)
m, r = dist.new_group(group_desc="model"), dist.new_group(group_desc="replica")
model = torch.nn.Linear(8 * world, 8 * world).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.empty_like(model.weight)
for _ in range(4):
    model(torch.randn(2, 8 * world, device="cuda")).sum().backward()
    if rank < 6:
        lookup = dist.all_to_all_single(rows, model.weight.detach(), group=m, async_op=True)  # named
        lookup.wait()
        total = dist.all_reduce(model.bias.grad, group=r, async_op=True)
    else:
        total = dist.all_reduce(model.bias.grad, group=r, async_op=True)  # named
        total.wait()
        if "asynchronous" not in sys.argv:
            print(model.bias.grad.tolist()[0])  # named
        lookup = dist.all_to_all_single(rows, model.weight.detach(), group=m, async_op=True)
    if "asynchronous" not in sys.argv:
        torch.cuda.synchronize()
    total.wait()
    lookup.wait()
    optimizer.step()
