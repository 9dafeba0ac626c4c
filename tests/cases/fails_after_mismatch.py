"""Rank 1 fails on a value that it only has because its calls before do not match rank 0's.

run: --world-size 2
exit: 3
says: rank 0 calls all_gather of 16 bytes int64
says: rank 1 calls all_reduce (sum) of 8 bytes int64
says: the script failed after calls that do not match: rank 1: ValueError: nobody else is here
"""

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
count = torch.ones(1, dtype=torch.int64, device="cuda")
if dist.get_rank() == 0:
    dist.all_gather_into_tensor(torch.empty(2, dtype=torch.int64, device="cuda"), count)  # named
else:
    dist.all_reduce(count)  # named
    raise ValueError("nobody else is here")
for _ in range(4):
    model(torch.randn(2, 4, device="cuda")).sum().backward()
    optimizer.step()
