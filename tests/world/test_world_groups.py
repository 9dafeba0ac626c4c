from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from virtual_rank import device

from echo_hooks.errors import UsageError


@pytest.mark.parametrize(
    "backend", ["nccl", "gloo", "cpu:gloo,cuda:nccl", "hccl", "mpi", "fake", "ucc", "xccl", "NCCL"]
)
def test_get_backend_answers_what_the_script_asked(world, backend):
    world(backend=backend, check_devices=False)
    assert dist.get_backend() == backend.lower()
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [4, 4]
    assert dist.get_rank() == 1 and dist.get_world_size() == 4
    assert dist.get_backend(dist.new_group([1, 2])) == backend.lower()
    assert dist.get_backend(dist.new_group([1, 2], backend="gloo")) == "gloo"


def test_no_backend_is_torchs_own_default(world):
    run = world(backend=None)
    assert dist.get_backend() == "undefined"
    assert run.recorder.groups[0].backend == "undefined"


def test_nccl_is_there(world):
    world()
    assert dist.is_nccl_available() and dist.is_backend_available("nccl")
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    options.config.cga_cluster_size = 2
    dist.new_group([0, 1], backend="nccl", pg_options=options)


def test_a_cpu_tensor_on_nccl_fails_as_in_a_real_job(world):
    world(backend="nccl")
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1))
    with pytest.raises(RuntimeError, match="device type meta"):
        dist.all_reduce(device(1))


def test_a_world_that_the_script_contradicts_is_refused(world):
    world(init=False)
    with pytest.raises(UsageError, match=r"world_size=8 .* says world_size=4"):
        dist.init_process_group("gloo", world_size=8, rank=1)
    dist.init_process_group("gloo", world_size=4, rank=1)


def test_every_group_is_in_the_table_of_every_rank(world):
    tables = []
    for rank in (0, 3):
        run = world(rank=rank, world_size=4)
        for ranks in ([0, 1], [2, 3]):
            dist.new_group(ranks, group_desc="TENSOR")
        dist.new_group([3, 1])
        tables.append(run.recorder.groups.groups)
    assert tables[0] == tables[1]
    names = [(g.index, g.name, g.ranks, g.family, g.member) for g in tables[0]]
    assert names == [
        (0, "world", (0, 1, 2, 3), 0, 0),
        (1, "TENSOR", (0, 1), 1, 0),
        (2, "TENSOR", (2, 3), 1, 1),
        (3, "group3", (1, 3), 2, 0),
    ]
    assert tables[0][3].site.startswith("test_world_groups.py:")


def test_non_members_and_group_ranks(world):
    run = world(rank=3)
    other, mine = dist.new_group([0, 1]), dist.new_group([1, 3])
    assert other is dist.GroupMember.NON_GROUP_MEMBER
    assert dist.get_rank(mine) == 1 and dist.get_process_group_ranks(mine) == [1, 3]
    assert dist.get_group_rank(mine, 1) == 0 and dist.get_global_rank(mine, 0) == 1
    dist.broadcast(torch.ones(1), 1, group=mine)
    assert run.calls() == [("broadcast", 2, 4, "float32", 1)]  # the root as a global rank


def test_groups_that_only_members_create(world):
    run = world(rank=0)
    assert dist.new_group([2, 1], use_local_synchronization=True) in (None, dist.GroupMember.NON_GROUP_MEMBER)
    assert run.recorder.groups[1].ranks == (1, 2)


def test_sub_groups_of_torch(world):
    run = world(rank=2)
    mine, _ = dist.new_subgroups(group_size=2)
    dist.all_reduce(torch.ones(1), group=mine)
    assert [g.ranks for g in run.recorder.groups] == [(0, 1, 2, 3), (0, 1), (2, 3)]
    assert run.calls()[0][1] == 2


def test_device_mesh_dimensions_give_the_names(world):
    run = world(rank=5, world_size=8)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    by_name: dict[str, list] = {}
    for group in run.recorder.groups:
        by_name.setdefault(group.name, []).append(group.ranks)
    assert {name: sorted(groups) for name, groups in by_name.items()} == {
        "world": [tuple(range(8))],
        "pp": [(0, 4), (1, 5), (2, 6), (3, 7)],
        "dp": [(0, 2), (1, 3), (4, 6), (5, 7)],
        "tp": [(0, 1), (2, 3), (4, 5), (6, 7)],
    }
    assert [g.family for g in run.recorder.groups] == [0, *[1] * 4, *[2] * 4, *[3] * 4]
    dist.all_reduce(torch.ones(1), group=mesh.get_group("dp"))
    assert run.recorder.groups[run.calls()[0][1]].ranks == (5, 7)


def test_split_group_registers_the_siblings(world):
    run = world(rank=3)
    mine = dist.split_group(split_ranks=[[0, 2], [1, 3]], group_desc="half")
    assert dist.get_process_group_ranks(mine) == [1, 3]
    inner = dist.split_group(mine, [[1], [0]])
    assert dist.get_process_group_ranks(inner) == [3]
    named = [(g.name, g.ranks) for g in run.recorder.groups]
    assert named[1:3] == [("half", (0, 2)), ("half", (1, 3))] and [r for _, r in named[3:]] == [(3,), (1,)]
    assert dist.get_process_group_ranks(mine.split_group([0, 1])) == [1, 3]


def test_running_numbers_are_per_group(world):
    run = world(rank=1)
    group = dist.new_group([0, 1])
    for _ in range(2):
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1), group=group)
    assert [(r["group"], r["seq"]) for r in run.records()] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert group._get_sequence_number_for_group() == 2


def test_groups_with_the_same_members_keep_their_payloads_apart(world):
    for rank in (0, 1):
        world(rank=rank, world_size=2)
        first, second = dist.new_group([0, 1]), dist.new_group([0, 1], backend="gloo")
        values = torch.tensor([7]) if rank == 0 else torch.tensor([0])
        others = torch.tensor([9]) if rank == 0 else torch.tensor([0])
        dist.broadcast(others, 0, group=second)
        dist.broadcast(values, 0, group=first)
    assert (values.item(), others.item()) == (7, 9)


def test_destroying_and_making_again(world):
    run = world()
    dist.destroy_process_group()
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    assert [g.name for g in run.recorder.groups] == ["world", "world"] and run.calls()[0][1] == 1


def test_rooted_calls_name_the_root(world):
    run = world(rank=1)
    dist.reduce(torch.ones(1), 2)
    dist.gather(torch.ones(1), None, 3)
    dist.scatter(torch.ones(1), None, 0)
    assert [(n, b, p) for n, _, b, _, p in run.calls()] == [("reduce", 4, 2), ("gather", 16, 3), ("scatter", 16, 0)]


def test_bytes_follow_nccl_tests(world):
    run = world(rank=1)
    dist.all_reduce(torch.ones(8))
    dist.all_gather_into_tensor(torch.ones(32), torch.ones(8))
    dist.all_gather([torch.ones(8) for _ in range(4)], torch.ones(8))
    dist.reduce_scatter_tensor(torch.ones(2), torch.ones(8))
    dist.all_to_all_single(torch.ones(8), torch.ones(8))
    dist.all_to_all_single(torch.ones(6, 2), torch.ones(4, 2), [1, 2, 2, 1], [1, 1, 1, 1])
    assert [b for _, _, b, _, _ in run.calls()] == [32, 128, 128, 32, 32, 48]
    uneven = run.records()[-1]["op"]
    assert uneven.attr("output_splits") == (2, 4, 4, 2) and uneven.attr("input_splits") == (2, 2, 2, 2)


def test_signatures_say_what_was_reduced(world):
    run = world()
    dist.all_reduce(torch.ones(8), dist.ReduceOp.MAX)
    operation = run.records()[0]["op"]
    assert operation.attr("reduce") == "max"
    assert operation.inputs[0].shape == (8,) and operation.inputs[0].dtype == "float32"


def test_numpy_split_sizes(world):
    numpy = pytest.importorskip("numpy")
    world()
    splits = list(numpy.array([1, 1, 1, 1]))
    dist.all_to_all_single(torch.ones(4), torch.ones(4), splits, splits)


def test_groups_that_their_members_make_alone_are_marked(world):
    run = world(rank=1)
    dist.new_group([0, 1])
    dist.new_group([1, 2], use_local_synchronization=True)
    dist.split_group(split_ranks=[[0, 1], [2, 3]])
    dist.new_group([0, 1])
    assert [group.local for group in run.world.recorder.groups] == [False, False, True, True, True, False]
