"""What kernels hold for themselves while they run, against sums by hand from ATen's CUDA sources.

The peak of a real H200 with it: rows 14 to 20 of the validation (Megatron's unfused attention), to the block.
"""

from __future__ import annotations

import gc

import pytest
import torch

from echo_hooks.capture.temporaries import temporaries
from echo_hooks.graph.memory import HOLDERS

aten = torch.ops.aten
BF16, F32, I64 = torch.bfloat16, torch.float32, torch.int64


def meta(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def held(func, *args, **kwargs) -> list[int]:
    """Of a call on tensors of the meta device."""
    return sorted(temporaries(func, args, kwargs, func(*args, **kwargs)))


def test_backward_of_softmax_makes_a_product_first():
    scores = meta(4, 8, 8, dtype=BF16)
    assert held(aten._softmax_backward_data.default, scores, scores, -1, BF16) == [512]
    assert held(aten._softmax_backward_data.default, scores.float(), scores.float(), -1, torch.float16) == [1024]
    assert held(aten._log_softmax_backward_data.default, scores, scores, -1, BF16) == []


def test_softmax_and_norms_copy_what_is_not_contiguous():
    assert held(aten._softmax.default, meta(6, 10), 1, False) == []
    assert held(aten._softmax.default, meta(10, 6).t(), 1, False) == [240]
    assert held(aten.native_layer_norm.default, meta(10, 6).t(), [10], None, None, 1e-5) == [240]


def test_sums_convert_their_input_first():
    mask = meta(100, dtype=torch.bool)
    assert held(aten.sum.default, mask) == [800]  # to int64
    assert held(aten.cumsum.default, mask, 0) == [800]
    assert held(aten.sum.default, meta(100, dtype=BF16), dtype=F32) == []  # within the kernel
    assert held(aten.sum.dim_IntList, meta(10, 10), [0], dtype=torch.float64) == [800]
    assert held(aten.mean.default, meta(100)) == []


def test_matrix_products_copy_operands_without_a_leading_dimension():
    left, right = meta(4, 8), meta(8, 2)
    assert held(aten.mm.default, left, right) == held(aten.mm.default, meta(8, 4).t(), right) == []
    assert held(aten.mm.default, left.narrow(1, 0, 4), meta(4, 2)) == []  # a wider leading dimension
    assert held(aten.mm.default, meta(1, 1).expand(4, 8), right) == [4 * 8 * 4]
    strided = meta(8, 8)[::1, ::2]  # neither rows nor columns are dense
    assert held(aten.mm.default, strided, meta(4, 2)) == [8 * 4 * 4]
    batched = meta(5, 3, 4, 8).permute(1, 0, 2, 3).flatten(0, 1)
    assert held(aten.bmm.default, batched, meta(8, 2).expand(15, 8, 2)) == []  # batches may share an operand


def test_backward_of_an_embedding_sorts_only_many_indices():
    def backward(count: int, rows: int, width: int = 512) -> list[int]:
        return held(
            aten.embedding_dense_backward.default,
            meta(count, width, dtype=BF16),
            meta(count, dtype=I64),
            rows,
            -1,
            False,
        )

    assert backward(3072, 50) == []
    # Sorted indices, their places and their runs: 8 B each; 50 runs at most, in 400 + 50 pieces of 512 floats.
    assert backward(4000, 50) == sorted([32_000, 32_000, 32_000, 400, 400, 450 * 8, 450 * 512 * 4])
    # In narrow rows the sort takes more: their numbers and its second buffers.
    assert backward(4000, 50, width=16) == [32_000] * 5


def test_adding_at_places_sorts_them():
    target, places, values = meta(100, 4), meta(7, dtype=I64), meta(7, 4)
    assert held(aten.index_put_.default, target, [places], values, True) == [56] * 6
    assert held(aten.index_put_.default, target, [places], values, False) == []


def test_a_masked_scatter_counts_first():
    target = meta(10, 6)
    assert held(aten.masked_scatter.default, target, meta(10, 6, dtype=torch.bool), meta(60)) == [480]
    assert held(aten.masked_scatter.default, target, meta(10, 1, dtype=torch.bool), meta(60)) == [60, 480]


def test_backward_of_flash_attention_adds_queries_up_in_float():
    query, key = meta(2, 4, 100, 40, dtype=BF16), meta(2, 2, 100, 40, dtype=BF16)

    def backward(q, k) -> list[int]:
        func = aten._scaled_dot_product_flash_attention_backward.default
        sums, seed = meta(2, 4, 100), meta(dtype=torch.uint64)
        args = (q, q, k, k, q, sums, None, None, 100, 100, 0.0, True, seed, seed)
        return sorted(temporaries(func, args, {}, None))

    sums, queries = 2 * 4 * 128 * 4, 2 * 4 * 128 * 64 * 4
    assert backward(query, query) == [sums, queries]
    assert backward(query, key) == sorted([sums, queries, 2 * 4 * 100 * 40 * 2, 2 * 4 * 100 * 40 * 2])


@pytest.mark.usefixtures("stage")
def test_the_peak_counts_them_and_nothing_stays(echo):
    scores = torch.empty(4, 1024, 1024, device="cuda", requires_grad=True)  # 16 MiB
    probabilities = scores.softmax(-1)
    upstream = torch.empty_like(probabilities)
    memory = echo.capture.memory
    torch.cuda.reset_peak_memory_stats()
    probabilities.backward(upstream)
    gc.collect()
    # Scores, probabilities and the two gradients; the product on top while the kernel runs.
    assert torch.cuda.max_memory_allocated() == 5 * 16 << 20
    del probabilities, upstream, scores
    gc.collect()
    assert memory.allocator.allocated_bytes == 0
    events = echo.recorder.memory.columns()
    passed = events["bytes"][events["holder"] == HOLDERS.index("workspaces")]
    assert passed.tolist() == [16 << 20, -(16 << 20)]


@pytest.mark.usefixtures("stage")
@pytest.mark.parametrize(
    "source, target, non_blocking, mib",
    [
        ("cuda", "cpu", True, 4),  # bfloat16 to float: the device converts, 1 Mi floats
        ("cuda", "cpu", False, 0),  # ... the host does
        ("cpu", "cuda", True, 2),  # what arrives is bfloat16 and converted there
        ("cpu", "cuda", False, 0),
    ],
)
def test_copies_that_must_not_block_are_converted_on_the_device(echo, source, target, non_blocking, mib):
    from_, to = torch.zeros(1 << 20, dtype=BF16, device=source), torch.zeros(1 << 20, device=target)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    to.copy_(from_, non_blocking=non_blocking)
    assert torch.cuda.max_memory_allocated() - before == mib << 20
    assert torch.cuda.memory_allocated() == before


@pytest.mark.usefixtures("stage")
def test_what_is_not_contiguous_on_the_device_is_copied_there_first(echo):
    rows = torch.zeros(1 << 10, 2 << 10, device="cuda")
    host = torch.zeros(1 << 10, 1 << 10)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    host.copy_(rows[:, ::2])
    assert torch.cuda.max_memory_allocated() - before == 4 << 20
