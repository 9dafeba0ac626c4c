"""Case 94: each rank makes only the group that it is in; torch wants the same calls, in one order, of all ranks.

run: --world-size 4 --trace-ranks all
exit: 3
fixed: fixed
fixed: local
says: new_group call #1 differs between the ranks: ranks 0,3 make one of ranks 0,3
says: ranks 1-2 make one of ranks 1-2
says: use_local_synchronization=True
"""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
pairs = [[0, 3], [1, 2]]
if "fixed" in sys.argv:
    group, _ = dist.new_subgroups_by_enumeration(pairs)
elif "local" in sys.argv:
    mine = next(pair for pair in pairs if rank in pair)
    group = dist.new_group(mine, use_local_synchronization=True)
else:
    mine = next(pair for pair in pairs if rank in pair)
    group = dist.new_group(mine)  # named
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.randn(2, 64, device="cuda")).sum().backward()
    dist.all_reduce(model.weight.grad, group=group)
    optimizer.step()
