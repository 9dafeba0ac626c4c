"""Counting what a really running step computes, beside tensor classes that dispatch by themselves."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from echo_hooks.capture.work import WorkCounter
from echo_hooks.graph.program import Phase


def test_sharded_tensors_work_out_shapes_below_the_counter():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    counter = WorkCounter()
    try:
        mesh = init_device_mesh("cpu", (1,))
        a, b, c = (distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]) for _ in range(3))
        counter.start()
        a.addcdiv_(b, c, value=-1.0)  # an op that DTensor sees for the first time runs once on fake tensors
        product = a.t() @ b
        counter.stop()
    finally:
        dist.destroy_process_group()
    assert a.to_local().eq(0).all() and product.shape == (4, 4)
    assert dict(counter.flops) == {("float32", int(Phase.FORWARD)): 2 * 4 * 8 * 4}
