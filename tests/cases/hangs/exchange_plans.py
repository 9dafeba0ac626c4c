"""Case 101: each rank of a context-parallel group works its exchange plan out; rank 2's is another for one input.

run: --world-size 4 --trace-ranks all
exit: 3
fixed: fixed
says: rank 1 sends 32 elements to rank 2 (input split 2), which expects 48 (output split 1)
"""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
model = torch.nn.Linear(16, 16).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = [[1, 2, 3, 4], [2, 2, 2, 2], [4, 3, 2, 1], [1, 1, 1, 1]]  # that rank i sends to rank j
if rank == 2 and "fixed" not in sys.argv:
    rows[1][2] = 3
for _ in range(4):
    sent, expected = rows[rank], [row[rank] for row in rows]
    x = model(torch.randn(sum(sent), 16, device="cuda"))
    y = torch.empty(sum(expected), 16, device="cuda")
    dist.all_to_all_single(y, x.detach(), expected, sent)  # named
    x.sum().backward()
    optimizer.step()
