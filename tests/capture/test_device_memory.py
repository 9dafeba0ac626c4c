"""Storages, the allocator behind them and who holds what, against sums by hand.

The caching allocator rounds a block to 512 bytes (PyTorch c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize).
"""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from echo_hooks.devices.libraries import cublas_workspace_bytes

pytestmark = pytest.mark.usefixtures("stage")


@pytest.fixture(autouse=True)
def _no_workspaces(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")


def rounded(*elements: int, itemsize: int = 4) -> int:
    return sum(-(-n * itemsize // 512) * 512 for n in elements)


def allocated(echo) -> int:
    gc.collect()
    return echo.capture.memory.allocator.allocated_bytes


def test_blocks_are_rounded_shared_by_views_and_freed_with_the_last(echo):
    tensor = torch.empty(100, device="cuda")
    view = tensor[:10]
    assert allocated(echo) == 512
    del tensor
    assert allocated(echo) == 512
    del view
    assert allocated(echo) == 0
    large = torch.empty(1000, 1000, dtype=torch.bfloat16, device="cuda")
    assert allocated(echo) == rounded(10**6, itemsize=2) == torch.cuda.memory_allocated()
    del large


def test_the_host_takes_no_device_memory(echo):
    on_host = torch.randn(1024, 1024)
    assert allocated(echo) == 0
    on_device = on_host.cuda()
    assert allocated(echo) == 4 << 20
    del on_device, on_host
    gc.collect()
    again = torch.empty(512, 1024)
    assert echo.capture.memory.host.peak_bytes == 4 << 20  # the first was gone when this came
    del again


def test_resizing_a_storage_frees_it(echo):
    """How FSDP gives the gathered parameters back."""
    tensor = torch.empty(1000, device="cuda")
    tensor.untyped_storage().resize_(0)
    assert allocated(echo) == 0 and tensor.data_ptr() == 0 and tensor.shape == (1000,)
    tensor.untyped_storage().resize_(4000)
    assert allocated(echo) == 4096 and tensor.data_ptr()
    del tensor
    assert allocated(echo) == 0


def test_a_typed_storage_is_the_same_one_counted_in_elements(echo):
    """How FSDP's older class gives the gathered parameters back."""
    tensor = torch.empty(1000, dtype=torch.bfloat16, device="cuda")
    storage = tensor._typed_storage()
    assert (storage._size(), len(storage), storage.dtype) == (1000, 1000, torch.bfloat16)
    assert storage._data_ptr() == tensor.untyped_storage().data_ptr() == tensor.data_ptr()
    storage._resize_(0)
    assert allocated(echo) == 0 and storage._size() == 0
    storage._resize_(1000)
    assert allocated(echo) == 2048
    del tensor, storage
    assert allocated(echo) == 0


def mlp(echo):
    """Two layers without biases, 256 -> 1024 -> 256, batch 64, AdamW; sizes in elements."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024, bias=False), nn.ReLU(), nn.Linear(1024, 256, bias=False)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, fused=True)
    return model, optimizer, torch.randn(64, 256, device="cuda")


W, HIDDEN, OUT = 256 * 1024, 64 * 1024, 64 * 256


def test_forward_backward_and_step_of_a_small_network(echo):
    model, optimizer, x = mlp(echo)
    base = rounded(W, W, OUT)  # weights and input
    assert allocated(echo) == base
    hidden = model[0](x)
    assert allocated(echo) == base + rounded(HIDDEN)
    hidden = model[1](hidden)  # relu keeps its result; its input is kept by nobody
    assert allocated(echo) == base + rounded(HIDDEN)
    loss = model[2](hidden).sum()
    assert allocated(echo) == base + rounded(HIDDEN, 1)  # sum needs no output kept
    del hidden
    loss.backward()
    assert allocated(echo) == base + rounded(1, W, W)  # loss and two gradients
    optimizer.step()
    # Two moments each; the step counter of fused AdamW is a device scalar per parameter.
    assert allocated(echo) == base + rounded(1, W, W) + 2 * rounded(W, W) + rounded(1, 1)
    optimizer.zero_grad(set_to_none=True)
    del loss
    assert allocated(echo) == base + 2 * rounded(W, W) + rounded(1, 1)


def test_the_peak_and_its_holders(echo):
    model, optimizer, x = mlp(echo)
    for _ in range(2):
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
    summary = echo.capture.trace().memory
    held = summary.held_at_peak
    assert held["parameters"] == 2 * W * 4
    assert held["optimizer"] == 4 * W * 4 + 2 * 4
    assert held["gradients"] in (W * 4, 2 * W * 4)
    assert sum(held.values()) <= summary.peak_allocated_bytes < sum(held.values()) + 512 * 20
    assert summary.peak_reserved_bytes >= summary.peak_allocated_bytes
    assert set(summary.peak_by_phase) >= {"forward", "backward", "optimizer"}


def test_checkpointing_keeps_less(echo):
    def peak(wrap):
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()).cuda() for _ in range(4)]
        x = torch.randn(512, 64, device="cuda", requires_grad=True)
        before = allocated(echo)
        for block in blocks:
            x = wrap(block, x)
        return allocated(echo) - before

    activation = rounded(512 * 64)
    plain = peak(lambda block, x: block(x))
    kept = peak(lambda block, x: checkpoint(block, x, use_reentrant=False))
    assert plain == 16 * activation  # four results a block; each is an input of the next op
    assert kept == 4 * activation  # one result a block


def test_events_of_the_window(echo):
    model, optimizer, x = mlp(echo)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    trace = echo.capture.trace()
    events = trace.memory_events
    assert events["record"].min() == 0 and events["record"].max() <= len(trace.program)
    assert (np.diff(events["record"]) >= 0).all()
    total = np.cumsum(events["bytes"])
    assert total.min() >= 0
    kept = (2 * W + 4 * W + OUT) * 4 + 2 * 4  # weights, moments, input; counters
    opened = total[np.flatnonzero(events["record"] == 0)[-1]]
    assert kept + 2 * W * 4 <= opened < kept + 2 * W * 4 + HIDDEN * 4  # gradients still live after the optimizer call
    assert total[-1] == kept  # zero_grad launches nothing: it still belongs to the last record


def test_most_of_the_device_can_be_taken(echo):
    tensor = torch.empty(70 << 30, dtype=torch.uint8, device="cuda")
    assert tensor.numel() == 70 << 30  # of 80 GB
    assert torch.cuda.max_memory_allocated() == 70 << 30
    del tensor


def test_each_thread_and_stream_that_multiplies_has_a_workspace(watch, monkeypatch):
    """PyTorch keeps 32 MiB on Hopper per cuBLAS handle and stream; backward's thread has a handle of its own."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    echo = watch()
    weight = torch.randn(64, 64, device="cuda", requires_grad=True)
    before = allocated(echo)
    product = weight @ weight
    assert allocated(echo) == before + (32 << 20) + rounded(64 * 64)
    product = weight @ weight
    assert allocated(echo) == before + (32 << 20) + rounded(64 * 64)
    product.sum().backward()
    del product
    assert allocated(echo) == before + (64 << 20) + rounded(64 * 64)  # the gradient
    with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
        weight @ weight
    assert allocated(echo) == before + (96 << 20) + rounded(64 * 64)
    held = echo.capture.trace().memory.held_at_peak
    assert held["workspaces"] == 96 << 20


def test_workspace_sizes():
    """CUBLAS_WORKSPACE_CONFIG counts pairs of KiB and number; the default before Hopper is :4096:2:16:8."""
    assert cublas_workspace_bytes((8, 0), {}) == 8519680  # as discuss.pytorch.org/t/178671 saw in a memory snapshot
    assert cublas_workspace_bytes((9, 0), {}) == 32 << 20
    assert cublas_workspace_bytes((9, 0), {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}) == 32 << 20
    assert cublas_workspace_bytes((9, 0), {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}) == 128 << 10
    assert cublas_workspace_bytes(None, {}) == 0


def test_a_collective_that_nobody_waits_for_keeps_nothing(echo, monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    dist.init_process_group("nccl")
    try:
        tensor = torch.ones(100_000, device="cuda")
        before = allocated(echo)
        result = torch.ops._c10d_functional.all_reduce(tensor, "sum", dist.group.WORLD.group_name)
        assert allocated(echo) == before + rounded(100_000)
        del result
        assert allocated(echo) == before
    finally:
        dist.destroy_process_group()


def test_large_tensors_on_the_host_are_counted_there(echo):
    host = echo.capture.memory.host
    states = [torch.zeros(1 << 20) for _ in range(3)]  # 4 MiB each, as an optimizer on the host keeps them
    assert allocated(echo) == 0 and host.peak_bytes == 12 << 20
    del states
    gc.collect()
    assert echo.capture.memory.host.peak_bytes == 12 << 20
    buffer = torch.empty(3 << 18, pin_memory=True)  # 3 MiB: the host allocator takes 4
    assert buffer.is_pinned() and host.pinned_bytes == 4 << 20
    assert torch.empty(3 << 18).pin_memory().is_pinned() and host.pinned_bytes == 8 << 20
    summary = echo.capture.memory.summary()
    assert (summary.host_peak_bytes, summary.host_pinned_bytes) == (12 << 20, 8 << 20)


def test_offloaded_shards_stay_on_the_host(echo):
    """FSDP2's CPUOffloadPolicy: this rank's eighth of the parameters, their gradients and both states of Adam."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    dist.init_process_group("nccl")
    model = nn.Linear(4096, 4096, bias=False)  # 64 MiB, 8 MiB a rank
    fully_shard(model, offload_policy=CPUOffloadPolicy())
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 4096, device="cuda")).sum().backward()
    optimizer.step()
    gc.collect()
    host = echo.capture.memory.host
    assert (host.pageable_bytes, host.pinned_bytes) == (3 * 8 << 20, 8 << 20)
    dist.destroy_process_group()
