"""Where communications run and who waits for them, on a stand-in device ("meta" tensors) and on the host."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the legacy namespace
from virtual_rank import device


def nccl(world, rank: int = 1, world_size: int = 4):
    return world(rank=rank, world_size=world_size, backend="nccl", check_devices=False)


def test_a_synchronous_collective_runs_on_the_callers_stream(world):
    run = nccl(world)
    side = run.recorder.program.new_stream("side")
    dist.all_reduce(device(4))
    run.recorder.stream = side
    dist.all_reduce(device(4))
    assert run.steps() == [("all_reduce", "default"), ("all_reduce", "side")]


def test_an_asynchronous_one_runs_between_two_events(world):
    run = nccl(world)
    work = dist.all_reduce(device(4), async_op=True)
    assert run.steps() == [
        ("record_event", "default"),
        ("wait_event", "comm:world"),
        ("all_reduce", "comm:world"),
        ("record_event", "comm:world"),
    ]
    work.wait()
    work.wait()  # changes nothing
    side = run.recorder.program.new_stream("side")
    run.recorder.stream = side
    work.wait()
    assert run.steps()[4:] == [("wait_event", "default"), ("wait_event", "side")]
    events = [r["event"] for r in run.records() if r["event"] >= 0]
    assert events == [0, 0, 1, 1, 1]


def test_polling_for_completion_is_a_wait_of_the_host(world):
    run = nccl(world)
    work = dist.all_reduce(device(4), async_op=True)
    assert work.is_completed() and work.is_completed()
    assert run.steps()[4:] == [("sync", "comm:world")]


def test_a_barrier_blocks_the_host(world):
    run = nccl(world)
    group = dist.group.WORLD
    options = dist.BarrierOptions()
    options.device, options.asyncOp = torch.device("meta"), False
    group.barrier(options).wait()
    assert run.steps() == [("barrier", "default"), ("sync", "default")]
    assert run.calls() == [("barrier", 0, 4, "float32", -1)]


def test_the_host_blocks_on_gloo(world):
    run = world()
    dist.all_reduce(torch.ones(4))
    dist.barrier()
    work = dist.all_reduce(torch.ones(4), async_op=True)
    work.wait()
    assert run.steps() == [
        ("all_reduce", "host"),
        ("barrier", "host"),
        ("all_reduce", "host:world"),
        ("record_event", "host:world"),
        ("sync", "host"),
    ]
    assert run.records()[-1]["event"] == 0
    assert run.calls()[1] == ("barrier", 0, 0, "", -1)


def test_a_pair_of_ranks_has_a_stream_of_its_own(world):
    run = nccl(world, rank=1)
    dist.send(device(4), 2)
    dist.recv(device(4), 0)
    assert run.steps()[2] == ("send", "p2p:world 1-2")
    assert run.steps()[-2:] == [("record_event", "p2p:world 0-1"), ("wait_event", "default")]
    assert run.calls() == [("send", 0, 16, "float32", 2), ("recv", 0, 16, "float32", 0)]
    assert {r["seq"] for r in run.records() if r["kind"] in ("send", "recv")} == {-1}


def test_directions_do_not_hold_each_other_up_on_gloo(world):
    run = world(rank=1)
    requests = [dist.irecv(torch.ones(1), 0), dist.isend(torch.ones(1), 0)]
    for request in requests:
        request.wait()
    streams = [r["stream"] for r in run.records() if r["kind"] in ("send", "recv")]
    assert streams == ["host:world 0>1", "host:world 1>0"]


def test_a_batch_is_one_kernel_on_the_groups_stream(world):
    run = nccl(world, rank=1)
    operations = [dist.P2POp(dist.isend, device(4), 2), dist.P2POp(dist.irecv, device(4), 0)]
    works = dist.batch_isend_irecv(operations)
    assert len(works) == 1
    works[0].wait()
    assert run.steps() == [
        ("record_event", "default"),
        ("wait_event", "comm:world"),
        ("send", "comm:world"),
        ("recv", "comm:world"),
        ("record_event", "comm:world"),
        ("wait_event", "default"),
    ]
    assert [r["batch"] for r in run.records() if r["kind"] in ("send", "recv")] == [0, 0]
    dist.batch_isend_irecv(operations)
    assert [r["batch"] for r in run.records() if r["kind"] in ("send", "recv")] == [0, 0, 1, 1]


def test_a_batch_on_gloo_is_its_parts(world):
    run = world(rank=1)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(1), 2), dist.P2POp(dist.irecv, torch.ones(1), 0)])
    assert len(works) == 2 and {r["batch"] for r in run.records()} == {-1}


def test_coalesced_calls_are_one_record(world):
    run = nccl(world)
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(device(2))
        dist.all_reduce(device(3))
    manager.wait()
    assert run.calls() == [("all_reduce", 0, 20, "float32", -1)]
    assert run.records()[2]["op"].attr("count") == 2
    assert run.steps()[-1] == ("wait_event", "default")


def test_a_bracket_on_a_device_is_one_batch(world):
    run = nccl(world)
    with dist._coalescing_manager(device=torch.device("meta"), async_ops=True) as manager:
        dist.broadcast(device(2), 0, async_op=True)
        dist.broadcast(device(3), 1, async_op=True)
    manager.wait()
    assert [s for s, _ in run.steps()] == [
        "record_event", "wait_event", "broadcast", "broadcast", "record_event", "wait_event",
    ]  # fmt: skip
    records = [r for r in run.records() if r["kind"] == "collective"]
    assert [r["batch"] for r in records] == [0, 0] and [r["seq"] for r in records] == [0, 1]


def test_futures_run_their_callbacks_behind_the_communication(world):
    run = nccl(world)
    seen = []

    def callback(future):
        seen.append(run.recorder.stream)
        return future.value()[0]

    tensor = device(4)
    future = dist.all_reduce(tensor, async_op=True).get_future().then(callback)
    assert future.wait() is tensor
    comm = run.recorder.comm_stream(0, "comm:world")
    assert seen == [comm] and run.recorder.stream == 0
    assert run.steps()[-2:] == [("record_event", "comm:world"), ("wait_event", "default")]
    assert run.records()[-1]["event"] == run.records()[-2]["event"]


def test_a_gloo_group_waits_on_the_host_whatever_the_tensor(world):
    run = world(rank=1, backend="cpu:gloo,meta:gloo")
    dist.all_reduce(device(4))
    assert run.steps() == [("all_reduce", "host")]


def test_host_time_is_the_scripts_alone(world):
    ticks = iter(range(0, 10**9, 1000))
    run = world()
    run.recorder.clock_ns = lambda: next(ticks)
    run.recorder.host_ns, run.recorder._left_ns = 0, next(ticks)
    dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(4))
    hosts = [r["host_us"] for r in run.records()]
    assert all(h <= 4 for h in hosts)  # a handful of ticks between calls, none from inside


def test_same_run_same_program(world):
    def once():
        run = nccl(world)
        dist.all_reduce(device(4), async_op=True).wait()
        dist.new_group([0, 1])
        dist.send(device(4), 2)
        dist.all_gather_object([None] * 4, {"a": 1})
        return [{k: v for k, v in r.items() if k != "host_us"} for r in run.records()], run.recorder.groups.groups

    def without_nan(rows):
        return [{k: v for k, v in r.items() if k not in ("duration_us", "site")} for r in rows]

    (first, groups), (second, again) = once(), once()
    assert without_nan(first) == without_nan(second) and groups == again
