from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from virtual_rank import device

OPS = torch.ops._c10d_functional


def nccl(world, **options):
    return world(rank=1, backend="nccl", check_devices=False, **options)


def name() -> str:
    return dist.group.WORLD.group_name


def test_shapes_values_and_bytes(world):
    run = nccl(world)
    answer = run.world.functional
    x = device(value=[[1, 2]], dtype=torch.int64)
    reduced = answer(OPS.all_reduce.default, (x, "sum", name()))
    gathered = answer(OPS.all_gather_into_tensor.default, (x, 4, name()))
    scattered = answer(OPS.reduce_scatter_tensor.default, (gathered, "max", 4, name()))
    exchanged = answer(OPS.all_to_all_single.default, (gathered, [0, 2, 2, 1], [1, 1, 1, 1], name()))
    assert reduced.shadow.tolist() == [[4, 8]] and x.shadow.tolist() == [[1, 2]]
    assert gathered.shadow.tolist() == [[1, 2]] * 4
    assert scattered.shape == (1, 2) and scattered.shadow.tolist() == [[1, 2]]
    assert exchanged.shape == (5, 2)
    assert [(n, b) for n, _, b, _, _ in run.calls()] == [
        ("all_reduce", 16), ("all_gather", 64), ("reduce_scatter", 64), ("all_to_all", 80),
    ]  # fmt: skip
    assert run.records()[-2]["op"].attr("output_splits") == (0, 4, 4, 2)


def test_a_wait_waits_for_its_own_collective(world):
    run = nccl(world)
    first = run.world.functional(OPS.all_reduce.default, (device(4), "sum", name()))
    second = run.world.functional(OPS.all_reduce.default, (device(4), "sum", name()))
    done = [r["event"] for r in run.records() if r["kind"] == "record_event" and r["stream"] == "comm:world"]
    before = len(run.records())
    assert run.world.functional(OPS.wait_tensor.default, (second.view(2, 2),)) is not None
    run.world.functional(OPS.wait_tensor.default, (first,))
    run.world.functional(OPS.wait_tensor.default, (first,))  # already waited for
    waits = run.records()[before:]
    assert [(r["kind"], r["event"]) for r in waits] == [("wait_event", done[1]), ("wait_event", done[0])]


def test_coalesced_is_one_record(world):
    run = nccl(world)
    outputs = run.world.functional(OPS.all_reduce_coalesced.default, ([device(2), device(3)], "sum", name()))
    assert [t.shape for t in outputs] == [(2,), (3,)]
    assert run.calls() == [("all_reduce", 0, 20, "float32", -1)]


def test_the_counter_is_the_eager_one(world):
    run = nccl(world)
    dist.all_reduce(device(4))
    run.world.functional(OPS.all_reduce.default, (device(4), "sum", name()))
    assert [r["seq"] for r in run.records() if r["kind"] == "collective"] == [0, 1]


def test_results_become_asynchronous_tensors(world):
    if not hasattr(OPS, "_wrap_tensor_autograd"):
        pytest.skip("this torch wraps in Python")
    run = nccl(world)
    tensor = device(4)
    wrapped = run.world.functional(OPS._wrap_tensor_autograd.default, (tensor,))
    assert isinstance(wrapped, functional.AsyncCollectiveTensor) and wrapped.elem is tensor


def test_an_op_that_is_not_simulated_says_so(world):
    run = nccl(world)
    with pytest.raises(NotImplementedError, match=r"aten\.add"):
        run.world.functional(torch.ops.aten.add.Tensor, (device(1), device(1)))


def test_real_tensors_reach_the_group_through_cpp(world):
    run = world(rank=1)
    group = dist.group.WORLD
    assert (functional.all_reduce(torch.ones(2), "sum", group) + 1).tolist() == [5, 5]
    assert (functional.all_gather_tensor(torch.ones(1), 0, group) + 0).tolist() == [1] * 4
    assert (functional.reduce_scatter_tensor(torch.ones(4), "sum", 0, group) + 0).tolist() == [4]
    assert [n for n, *_ in run.calls()] == ["all_reduce", "all_gather", "reduce_scatter"]
    syncs = [r for r in run.records() if r["kind"] == "sync"]
    assert len(syncs) == 3  # each was waited for at first use
