"""Every step: training, an evaluation without gradients whose result is reduced, a checkpoint written by rank 0."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("cpu:gloo,cuda:nccl")
rank, device = dist.get_rank(), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder, src=0)
on_host = dist.new_group(backend="gloo")
model = torch.nn.Sequential(torch.nn.Embedding(100, 32), torch.nn.Flatten(), torch.nn.Linear(256, 100)).to(device)
ddp = DistributedDataParallel(model, device_ids=[device.index])
optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
best = float("inf")
for step in range(10):
    ddp.train()
    tokens = torch.randint(100, (4, 9), device=device)
    loss = torch.nn.functional.cross_entropy(ddp(tokens[:, :-1]), tokens[:, -1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

    ddp.eval()
    total = torch.zeros(2, device=device)
    with torch.no_grad():
        for _ in range(3):
            held_out = torch.randint(100, (8, 9), device=device)
            total[0] += torch.nn.functional.cross_entropy(ddp(held_out[:, :-1]), held_out[:, -1], reduction="sum")
            total[1] += len(held_out)
    dist.all_reduce(total)
    mean = (total[0] / total[1]).item()
    times = [None] * dist.get_world_size()
    dist.all_gather_object(times, step, group=on_host)
    if rank == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "best": best}
        torch.save(state, os.path.join(folder[0], "last.pt"))
    best = min(best, mean)
    dist.barrier()
state = torch.load(os.path.join(folder[0], "last.pt"), map_location=device)
