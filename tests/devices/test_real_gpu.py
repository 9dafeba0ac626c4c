"""The models against a real GPU (skipped without one): the allocator step by step, the choice of attention kernels."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys

import pytest
import torch

from echo_hooks.devices.allocator import CachingAllocator
from echo_hooks.devices.attention import Request, choose
from echo_hooks.devices.libraries import cudnn_version, torch_release

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

COMPARED = [
    f"{name}.{pool}.current"
    for name in (
        "allocated_bytes",
        "requested_bytes",
        "reserved_bytes",
        "inactive_split_bytes",
        "segment",
        "allocation",
    )
    for pool in ("small_pool", "large_pool")
]


def compare_allocators(expandable: bool, seed: int, steps: int = 400) -> str:
    """ "" when model and GPU agree after every step, else the first difference."""
    chance = random.Random(seed)
    model = CachingAllocator(torch.cuda.get_device_properties(0).total_memory, expandable_segments=expandable)
    torch.cuda.empty_cache()
    live: list[tuple] = []
    for step in range(steps):
        action = chance.random()
        if action < 0.6 or not live:
            size = chance.choice([chance.randint(1, 4096), chance.randint(1, 2**21), chance.randint(1, 2**26)])
            live.append((torch.cuda.caching_allocator_alloc(size), model.allocate(size)))
        elif action < 0.98:
            address, block = live.pop(chance.randrange(len(live)))
            torch.cuda.caching_allocator_delete(address)
            model.free(block)
        else:
            torch.cuda.empty_cache()
            model.empty_cache()
        real, modelled = torch.cuda.memory_stats(), model.stats()
        for name in COMPARED:
            if real[name] != modelled[name]:
                return f"seed {seed}, step {step}, {name}: GPU {real[name]}, model {modelled[name]}"
    for address, _ in live:
        torch.cuda.caching_allocator_delete(address)
    return ""


@pytest.mark.parametrize("expandable", [False, True])
def test_allocator_follows_the_gpu(expandable):
    """In a process of its own: the setting is read once. Equal sizes at invented addresses may be taken in another
    order than on the GPU, so not every random sequence need agree to its end; most must."""
    script = (
        f"import test_real_gpu as t; print(*[t.compare_allocators({expandable}, s) for s in range(10)], sep=chr(10))"
    )
    setting = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"}
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **setting, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    differences = [line for line in done.stdout.splitlines() if line]
    assert len(differences) <= 2, differences


def attention_cases():
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    heads = ((64, 64), (128, 128), (36, 36), (30, 30), (160, 160), (192, 128), (256, 256), (264, 264), (64, 32))
    for dtype, (head, value_head), mask, causal, grouped, dropout, grad in itertools.product(
        dtypes, heads, (False, True), (False, True), (False, True), (0.0, 0.1, 0.125), (False, True)
    ):
        if not (mask and causal):
            yield dtype, head, value_head, mask, causal, grouped, dropout, grad


def test_attention_choice_is_the_gpus():
    version = torch.cuda.get_device_capability()
    different = []
    for case in attention_cases():
        dtype, head, value_head, mask, causal, grouped, dropout, grad = case
        query, key, value = (
            torch.empty(2, heads, 32, size, dtype=dtype, device="cuda", requires_grad=grad)
            for heads, size in ((4, head), (2 if grouped else 4, head), (2 if grouped else 4, value_head))
        )
        attn_mask = torch.zeros(32, 32, dtype=dtype, device="cuda") if mask else None
        real = torch._fused_sdp_choice(query, key, value, attn_mask, dropout, causal, enable_gqa=grouped)
        modelled = choose(
            Request(query, key, value, attn_mask, dropout, causal, grouped, version, cudnn_version(), torch_release())
        )
        if real != modelled:
            different.append((case, real, modelled))
    assert not different, f"{len(different)} cases, first: {different[:5]}"
