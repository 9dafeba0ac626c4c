"""Case 98: a prefetch on one communicator while another works: in one order on all ranks, so nothing is wrong.

run: --world-size 4
exit: 0
says: up to 2 communicators have kernels on one accelerator at once (fsdp, tp; rank 0
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("fsdp", "tp"))
torch.cuda.set_device(dist.get_rank())
fsdp, tp = mesh.get_group("fsdp"), mesh.get_group("tp")
model = torch.nn.Linear(8192, 8192).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
gathered = torch.empty(2 * 8192, 8192, device="cuda")
for _ in range(4):
    prefetch = dist.all_gather_into_tensor(gathered, model.weight.detach(), group=fsdp, async_op=True)  # named
    y = model(torch.randn(16, 8192, device="cuda"))
    dist.all_reduce(y, group=tp)  # named
    prefetch.wait()
    y.sum().backward()
    optimizer.step()
