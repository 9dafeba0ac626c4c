"""What a call returns: uniform ranks, donors, made-up answers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from virtual_rank import device

from echo_hooks.world.values import reduce_name, reduce_values

OPS = dist.ReduceOp


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (OPS.SUM, [4, 8, 12]),
        (OPS.AVG, [1, 2, 3]),
        (OPS.MAX, [1, 2, 3]),
        (OPS.MIN, [1, 2, 3]),
        (OPS.PRODUCT, [1, 16, 81]),
    ],
)
def test_all_reduce_of_uniform_ranks(world, op, expected):
    world()
    tensor = torch.tensor([1.0, 2.0, 3.0])
    dist.all_reduce(tensor, op)
    assert tensor.tolist() == expected


@pytest.mark.parametrize(
    ("op", "size", "expected"),
    [("band", 4, 5), ("bor", 4, 5), ("bxor", 4, 0), ("bxor", 3, 5), ("sum", 4, 20), ("product", 2, 25)],
)
def test_reduce_of_integers(op, size, expected):
    assert reduce_values(op, torch.tensor([5]), size, {}).tolist() == [expected]


def test_reduce_of_booleans_is_or_and_and():
    own = torch.tensor([True, False])
    peer = {1: torch.tensor([False, False])}
    assert reduce_values("sum", own, 2, peer).tolist() == [True, False]
    assert reduce_values("product", own, 2, peer).tolist() == [False, False]
    assert reduce_values("sum", own, 2, peer).dtype == torch.bool


def test_reduce_with_known_peers_counts_the_unknown_as_own():
    own, peers = torch.tensor([2]), {0: torch.tensor([10])}
    assert reduce_values("sum", own, 4, peers).tolist() == [10 + 3 * 2]
    assert reduce_values("max", own, 4, peers).tolist() == [10]
    assert reduce_values("avg", own.float(), 4, peers).tolist() == [4.0]


def test_reduce_names_of_every_form():
    assert reduce_name(OPS.SUM) == "sum" and reduce_name("avg") == "avg" and reduce_name(OPS(OPS.MAX)) == "max"
    with pytest.raises(NotImplementedError, match="'median'"):
        reduce_name("median")


def test_dtype_is_kept(world):
    world()
    for dtype in (torch.bfloat16, torch.float16, torch.int32, torch.uint8):
        tensor = torch.ones(2, dtype=dtype)
        dist.all_reduce(tensor)
        assert tensor.dtype == dtype and tensor.tolist() == [4, 4]


def test_gathers_repeat_own_value(world):
    world()
    outputs = [torch.zeros(2) for _ in range(4)]
    dist.all_gather(outputs, torch.tensor([1.0, 2.0]))
    assert [o.tolist() for o in outputs] == [[1, 2]] * 4
    flat = torch.zeros(8)
    dist.all_gather_into_tensor(flat, torch.tensor([1.0, 2.0]))
    assert flat.tolist() == [1, 2] * 4


def test_reduce_scatter_gives_own_chunk_times_n(world):
    world(rank=2)
    output = torch.zeros(2)
    dist.reduce_scatter_tensor(output, torch.arange(8.0))
    assert output.tolist() == [16, 20]  # 4 and 5, from four equal ranks
    dist.reduce_scatter(output, [torch.full((2,), float(i)) for i in range(4)], op=OPS.MAX)
    assert output.tolist() == [2, 2]


def test_gather_and_reduce_reach_the_root_only(world):
    world(rank=1)
    tensor = torch.ones(2)
    dist.reduce(tensor, 0)
    assert tensor.tolist() == [1, 1]
    dist.reduce(tensor, 1)
    assert tensor.tolist() == [4, 4]
    slots = [torch.zeros(1) for _ in range(4)]
    dist.gather(torch.tensor([3.0]), slots, 1)
    assert [s.item() for s in slots] == [3, 3, 3, 3]


def test_all_to_all_copies_the_common_prefix(world):
    world()
    output = torch.full((6,), 9.0)
    dist.all_to_all_single(output, torch.arange(4.0), [3, 1, 1, 1], [1, 1, 1, 1])
    assert output.tolist() == [0, 1, 2, 3, 0, 0]


def test_broadcast_keeps_own_value_and_counts_it(world):
    run = world(rank=1)
    flags = torch.tensor([1, 0, 7])
    dist.broadcast(flags, 0)
    assert flags.tolist() == [1, 0, 7]
    assert run.assumed() == {"broadcast of int64 from rank 0": "as this rank's own"}
    assert run.world.unanswered == {0}


def test_broadcast_replays_the_donor(world):
    world(rank=0)
    dist.broadcast(torch.tensor([1, 0, 7]), 0)
    run = world(rank=1)
    flags = torch.zeros(3, dtype=torch.int64)
    dist.broadcast(flags, 0)
    assert flags.tolist() == [1, 0, 7] and not run.assumed() and not run.world.unanswered


def test_donors_of_gather_reduce_and_all_to_all(world):
    for rank in (0, 1):
        world(rank=rank, world_size=2)
        own = torch.tensor([rank + 1, 10 * (rank + 1)])
        outputs = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(outputs, own)
        total = own.clone()
        dist.all_reduce(total)
        exchanged = torch.zeros(2, dtype=torch.int64)
        dist.all_to_all_single(exchanged, own)
        scattered = torch.zeros(1, dtype=torch.int64)
        dist.reduce_scatter_tensor(scattered, own)
    assert [o.tolist() for o in outputs] == [[1, 10], [2, 20]]
    assert total.tolist() == [3, 30]
    assert exchanged.tolist() == [10, 20]
    assert scattered.tolist() == [30]


def test_large_payloads_are_not_kept(world):
    world(rank=0)
    dist.broadcast(torch.ones(1025), 0)  # 4100 bytes
    run = world(rank=1)
    tensor = torch.zeros(1025)
    dist.broadcast(tensor, 0)
    assert tensor.sum() == 0 and not run.assumed()


def test_scatter_replays_or_is_made_up(world):
    world(rank=0)
    dist.scatter(torch.zeros(2), [torch.full((2,), float(i)) for i in range(4)], 0)
    world(rank=3)
    tensor = torch.zeros(2)
    dist.scatter(tensor, None, 0)
    assert tensor.tolist() == [3, 3]
    world(rank=3)
    tensor = torch.full((1000,), float("nan"))
    dist.scatter(tensor, None, 1)
    assert 0.015 < tensor.std() < 0.025


def test_received_floats_are_finite_seeded_and_leave_the_scripts_generator_alone(world):
    def received(seed):
        world(seed=seed)
        before = torch.get_rng_state()
        tensor = torch.full((4096,), float("nan"), dtype=torch.bfloat16)
        dist.recv(tensor, 0)
        assert torch.equal(before, torch.get_rng_state())
        return tensor.float()

    first, again, other = received(0), received(0), received(1)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert abs(first.mean()) < 0.002 and 0.018 < first.std() < 0.022


def test_received_control_integers(world):
    run = world(rank=1)
    one = torch.zeros(1, dtype=torch.int32)
    dist.recv(one, 0)
    assert one.item() == 1  # nobody knows
    dist.send(torch.tensor([0], dtype=torch.int32), 2)
    dist.recv(one, 2)
    assert one.item() == 0  # an echo of what was last sent to that peer
    flag = torch.ones(2, dtype=torch.uint8)
    dist.recv(flag, 0)
    assert flag.tolist() == [0, 0]
    assert run.assumed()["recv from rank 0 of int32"] == "1"


def test_received_integers_come_from_the_donor_in_order(world):
    world(rank=0)
    for value in (5, 6):
        dist.send(torch.tensor([value]), 1)
    run = world(rank=1)
    got = torch.zeros(1, dtype=torch.int64)
    for value in (5, 6):
        dist.recv(got, 0)
        assert got.item() == value
    assert not run.assumed()


def test_gloo_matches_messages_by_tag(world):
    world(rank=0)
    dist.send(torch.tensor([1]), 1, tag=10)
    dist.send(torch.tensor([2]), 1, tag=20)
    world(rank=1)
    got = torch.zeros(1, dtype=torch.int64)
    dist.recv(got, 0, tag=20)
    assert got.item() == 2


def test_recv_from_anyone_names_its_source(world):
    run = world(rank=1)
    assert dist.recv(torch.zeros(1)) == 2
    assert "source of a receive from anyone" in run.assumed()


def test_disagreement_is_a_finding(world):
    world(rank=0)
    dist.all_reduce(torch.ones(2))
    run = world(rank=1)
    dist.all_reduce(torch.ones(3))
    (problem,) = run.world.findings
    assert problem.kind == "mismatch" and problem.ranks == (0, 1)
    assert "all_reduce of 8 bytes float32" in problem.message and "of 12 bytes" in problem.message
    assert problem.message in run.recorder.notes


def test_pretended_values_stay_exact_or_become_unknown(world):
    world(backend="nccl", check_devices=False)
    known, unknown = device(value=[1, 2], dtype=torch.int64), device(3)
    dist.all_reduce(known)
    dist.all_reduce(unknown)
    assert known.shadow.tolist() == [4, 8] and unknown.shadow is None
    gathered = device(8, dtype=torch.int64)
    dist.all_gather_into_tensor(gathered, known)
    assert gathered.shadow.tolist() == [4, 8] * 4
    stale = device(value=[1.0, 2.0])
    dist.reduce_scatter_tensor(stale, device(8))
    assert stale.shadow is None
    received = device(value=[1.0])
    dist.recv(received, 0)
    assert received.shadow is None
    flag = device(1, dtype=torch.int64)
    dist.recv(flag, 0)
    assert flag.shadow.tolist() == [1]
