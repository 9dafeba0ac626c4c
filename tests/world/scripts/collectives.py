"""Every call of torch.distributed that gloo can make, once or more."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
left, right = (rank - 1) % world, (rank + 1) % world


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
    dist.all_reduce(ones(5), op)
dist.all_reduce(ones(3, dtype=torch.int64))
work = dist.all_reduce(ones(7, dtype=torch.bfloat16), async_op=True)
work.wait()
dist.broadcast(ones(4), 0)
dist.broadcast(ones(4, dtype=torch.int32), world - 1, async_op=True).wait()
dist.reduce(ones(6), 1)
dist.all_gather([ones(3) for _ in range(world)], ones(3))
dist.all_gather_into_tensor(ones(2 * world), ones(2))
dist.reduce_scatter_tensor(ones(2), ones(2 * world))
dist.reduce_scatter(ones(3), [ones(3) for _ in range(world)])
dist.all_to_all_single(ones(world * 2), ones(world * 2))
splits = [1 + ((rank + i) % 2) for i in range(world)]  # symmetric: what I send to i is what I get from i
dist.all_to_all_single(ones(sum(splits), 3), ones(sum(splits), 3), splits, splits)
dist.gather(ones(2), [ones(2) for _ in range(world)] if rank == 0 else None, 0)
dist.scatter(ones(2), [ones(2) for _ in range(world)] if rank == 1 else None, 1)
dist.barrier()

if rank % 2 == 0:
    dist.send(ones(9), right)
    dist.recv(ones(9), left)
else:
    dist.recv(ones(9), left)
    dist.send(ones(9), right)
requests = [dist.irecv(ones(4), left), dist.isend(ones(4), right)]
for request in requests:
    request.wait()
batch = [dist.P2POp(dist.isend, ones(8), right), dist.P2POp(dist.irecv, ones(8), left)]
for request in dist.batch_isend_irecv(batch):
    request.wait()

objects = [None] * world
dist.all_gather_object(objects, {"a": 1})
dist.gather_object("text", objects if rank == 0 else None, 0)
dist.broadcast_object_list([[1, 2], "x"], 0)
dist.scatter_object_list([7], [7] * world if rank == 0 else None, 0)
if rank == 0:
    dist.send_object_list([{"k": [1]}], 1)
if rank == 1:
    dist.recv_object_list([{"k": [1]}], 0)

with dist._coalescing_manager():
    dist.all_reduce(ones(3))
    dist.all_reduce(ones(4))
with dist._coalescing_manager(async_ops=True) as manager:
    dist.all_gather_into_tensor(ones(2 * world), ones(2))
    dist.all_gather_into_tensor(ones(3 * world), ones(3))
manager.wait()
with dist._coalescing_manager():
    dist.reduce_scatter_tensor(ones(2), ones(2 * world))
    dist.reduce_scatter_tensor(ones(3), ones(3 * world))

pair = dist.new_group([0, 1], group_desc="pair")
if rank < 2:
    dist.all_reduce(ones(2), group=pair)
    dist.broadcast(ones(2), 1, group=pair)
mine, _ = dist.new_subgroups(group_size=2)
dist.all_reduce(ones(11), group=mine)
mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
for name in ("dp", "tp"):
    dist.all_reduce(ones(13), group=mesh.get_group(name))

group = dist.group.WORLD
(funcol.all_reduce(ones(4), "sum", group) + 1).sum()
(funcol.all_gather_tensor(ones(4), 0, group) + 1).sum()
(funcol.reduce_scatter_tensor(ones(4 * world), "sum", 0, group) + 1).sum()
(funcol.broadcast(ones(4), 0, group) + 1).sum()
(funcol.all_to_all_single(ones(2 * world), None, None, group) + 1).sum()
[t + 1 for t in funcol.all_reduce_coalesced([ones(2), ones(3)], "sum", group)]
[t + 1 for t in funcol.all_gather_into_tensor_coalesced([ones(2), ones(3)], group)]
[t + 1 for t in funcol.reduce_scatter_tensor_coalesced([ones(2 * world), ones(3 * world)], "sum", [0, 0], group)]
