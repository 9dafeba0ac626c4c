"""DDP's reducer over tensors without data ("meta" stands for the device)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from virtual_rank import device


def test_parameters_are_verified_and_broadcast(world):
    run = world(rank=1, backend="nccl", check_devices=False)
    tensors = [device(4, 3), device(5), device(2, 2, dtype=torch.bfloat16)]
    dist._verify_params_across_processes(dist.group.WORLD, tensors, None)
    dist._broadcast_coalesced(dist.group.WORLD, tensors, 1 << 20, 0)
    assert run.calls() == [
        ("all_gather", 0, 4 * 8, "int64", -1),
        ("broadcast", 0, 2 * (2 + 1 + 2) * 8, "int64", 0),
        ("broadcast", 0, 17 * 4, "float32", 0),
        ("broadcast", 0, 4 * 2, "bfloat16", 0),
    ]


def test_buckets_are_cut_at_their_size(world):
    run = world(rank=1, backend="nccl", check_devices=False)
    dist._broadcast_coalesced(dist.group.WORLD, [device(100) for _ in range(5)], 800, 2)
    assert [(n, b, p) for n, _, b, _, p in run.calls()] == [
        ("broadcast", 800, 2),
        ("broadcast", 800, 2),
        ("broadcast", 400, 2),
    ]


def test_the_reducers_wait_is_recorded_at_the_end_of_backward(world):
    run = world(rank=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    before = len(run.records())
    model(torch.ones(2, 3)).sum().backward()
    assert run.steps()[before:] == [
        ("all_reduce", "host:world"),
        ("record_event", "host:world"),
        ("sync", "host"),
    ]


@pytest.mark.parametrize("hook", [False, True])
def test_gradients_of_uniform_ranks_keep_their_size(world, hook):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def gradient(wrap):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 3)
        if wrap:
            model = torch.nn.parallel.DistributedDataParallel(model)
            if hook:
                model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        model(torch.ones(2, 3)).sum().backward()
        return next(model.parameters()).grad

    world(rank=1)
    assert torch.allclose(gradient(True), gradient(False))  # DDP divides the sum by the world size


def test_the_reducer_runs_without_data(world):
    """One bucket with all weights, until the rebuild, which needs known values on the device."""
    run = world(rank=1, backend="nccl", check_devices=False)
    with torch.device("meta"):
        layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(6)))
    model = torch.nn.parallel.DistributedDataParallel(layers, static_graph=True)
    for _ in range(2):
        before = len(run.records())
        model(device(2, 64)).sum().backward()
    assert run.steps()[before:] == [
        ("record_event", "default"),
        ("wait_event", "comm:world"),
        ("all_reduce", "comm:world"),
        ("record_event", "comm:world"),
        ("wait_event", "default"),
    ]
    assert run.records()[before + 2]["bytes"] == 6 * 64 * 64 * 4
