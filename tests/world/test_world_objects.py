from __future__ import annotations

import pickle

import pytest
import torch.distributed as dist


def test_everyone_holds_my_object(world):
    run = world(rank=1)
    objects = [None] * 4
    dist.all_gather_object(objects, {"host": "a"})
    assert objects == [{"host": "a"}] * 4
    dist.gather_object("x", objects, 1)
    assert objects == ["x"] * 4
    assert run.assumed()["peers' objects in all_gather_object"] == "as this rank's own"


def test_messages_are_sizes_then_bytes(world):
    run = world(rank=1)
    dist.all_gather_object([None] * 4, "x")
    dist.gather_object("x", None, 0)
    dist.broadcast_object_list(["x", "y"], 0)
    dist.scatter_object_list(["x"], None, 0)
    dist.send_object_list(["x"], 2)
    dist.recv_object_list(["x"], 2)
    names = [(name, nbytes, dtype, peer) for name, _, nbytes, dtype, peer in run.calls()]
    one = len(pickle.dumps("x"))
    assert names == [
        ("all_gather", 32, "int64", -1),
        ("all_gather", 4 * one, "uint8", -1),
        ("all_gather", 32, "int64", -1),
        ("gather", 4 * one, "uint8", 0),
        ("broadcast", 16, "int64", 0),
        ("broadcast", 2 * one, "uint8", 0),
        ("broadcast", 8, "int64", 0),
        ("scatter", 4 * one, "uint8", 0),
        ("scatter", 32, "int64", 0),
        ("send", 8, "int64", 2),
        ("send", one, "uint8", 2),
        ("recv", 8, "int64", 2),
        ("recv", one, "uint8", 2),
    ]


def test_objects_of_ranks_traced_before(world):
    for rank in range(3):
        run = world(rank=rank, world_size=3)
        gathered = [None] * 3
        dist.all_gather_object(gathered, {"rank": rank})
        broadcast = [rank, None]
        dist.broadcast_object_list(broadcast, 0)
        scattered = [None]
        dist.scatter_object_list(scattered, ["a", "b", "c"] if rank == 0 else None, 0)
        if rank:
            received = [None]
            assert dist.recv_object_list(received, rank - 1) == rank - 1
            assert received == [["to", rank]]
        if rank < 2:
            dist.send_object_list([["to", rank + 1]], rank + 1)
    assert gathered == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert broadcast == [0, None] and scattered == ["c"]
    assert not run.assumed()


def test_objects_that_json_cannot_hold_stay_the_callers_own(world):
    world(rank=0)
    dist.broadcast_object_list([(1, 2)], 0)
    run = world(rank=1)
    objects = [(3, 4)]
    dist.broadcast_object_list(objects, 0)
    assert objects == [(3, 4)]
    assert run.assumed() == {"broadcast_object_list from rank 0": "the caller's own objects"}


def test_sub_groups_and_group_ranks(world):
    world(rank=3)
    group = dist.new_group([1, 3])
    objects = [None, None]
    dist.all_gather_object(objects, 1, group=group)
    assert objects == [1, 1]
    assert dist.recv_object_list([0], group_src=0, group=group) == 1
    with pytest.raises(ValueError, match="at least 1"):
        dist.scatter_object_list([], None, 1, group=group)


def test_on_a_device_the_host_waits_for_what_it_reads(world):
    run = world(rank=1, backend="nccl", check_devices=False)
    dist.broadcast_object_list(["x"], 0, device="meta")
    assert run.steps() == [
        ("broadcast", "default"),
        ("sync", "default"),
        ("broadcast", "default"),
        ("sync", "default"),
    ]
    assert run.records()[1]["stream"] == "default"


def test_batched_messages_of_objects(world):
    run = world(rank=1, backend="nccl", check_devices=False)
    dist.send_object_list(["x"], 2, device="meta", use_batch=True)
    sends = [r for r in run.records() if r["kind"] == "send"]
    assert [r["stream"] for r in sends] == ["comm:world"] * 2 and [r["batch"] for r in sends] == [0, 1]
