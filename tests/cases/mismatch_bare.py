"""Rank 0 reduces where rank 1 broadcasts, in a script that never trains.

run: --world-size 2
exit: 3
says: all_reduce
says: broadcast
"""

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
tensor = torch.ones(4, device="cuda")
if dist.get_rank() == 0:
    dist.all_reduce(tensor)  # named
else:
    dist.broadcast(tensor, 0)  # named
