"""Case 99: two groups in an order of each rank's own, which is fine until the host reads a tensor in between.

run: --world-size 8 --trace-ranks all
exit: 3
fixed: asynchronous
fixed: some
says: ranks 0,6 wait for each other in a circle
says: rank 0 waits in all_to_all of 16384 bytes float32, call #0 on group 1 (model, ranks 0-7)
says: rank 6 waits in all_reduce (sum) of 256 bytes float32, call #0 on group 2 (replica, ranks 0-7)
says: whose host waits at a stream synchronisation at hidden_synchronisation.py:
says: The others: ranks 1-5 wait in all_to_all on model
says: rank 7 waits in all_reduce on replica
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


def look_up():
    return dist.all_to_all_single(rows, model.weight.detach(), group=m, async_op=True)  # named


def average():
    return dist.all_reduce(model.bias.grad, group=r, async_op=True)  # named


# With "some", ranks 6 and 7 alone read: the others' second call is on its way all the same.
reads = rank >= 6 if "some" in sys.argv else "asynchronous" not in sys.argv
for _ in range(4):
    model(torch.randn(2, 8 * world, device="cuda")).sum().backward()
    first, second = (look_up, average) if rank < 6 else (average, look_up)
    begun = first()
    if reads:
        begun.wait()
        print((rows if rank < 6 else model.bias.grad).flatten()[:2].tolist())  # named
    also = second()
    begun.wait()
    also.wait()
    optimizer.step()
