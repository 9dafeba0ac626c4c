"""Memory that one op takes and gives back while it runs, beside its outputs: no tensor shows it, the peak does.

What ATen's CUDA kernels allocate for themselves, read from their sources (the file is named at each rule). Left out:
what stays below a few MiB whatever the shapes (partial sums of reductions), and workspaces whose size only a closed
library knows (cuDNN's).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

_FLOAT_BYTES = torch.float32.itemsize

_EMBEDDING_WITHOUT_SORT = 3072  # Embedding.cu: up to so many indices one kernel adds the rows without sorting
_EMBEDDING_ROWS_PER_THREAD = 10  # EmbeddingBackwardKernel.cu: NROWS_PER_THREAD


def temporaries(func, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> tuple[int, ...]:
    """Sizes in bytes of what the op's kernel holds beside its arguments and ``result`` at its fullest moment."""
    rule = _RULES.get(func._schema.name.removeprefix("aten::").rstrip("_"))
    if rule is None:
        return ()
    values = dict(zip((argument.name for argument in func._schema.arguments), args))
    return tuple([size for size in rule({**values, **kwargs}, result) if size])


def crossing(source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> tuple[int, ...]:
    """Of a copy between host and device, on the device (cuda/Copy.cu, copy_kernel_cuda).

    Only contiguous memory of one dtype crosses. The device converts when the copy must not block, else the host does;
    what is not contiguous on the device is copied there.
    """
    same = source.dtype == target.dtype
    if same and (source.stride() == target.stride() or (source.is_contiguous() and target.is_contiguous())):
        return ()
    on_device, dtype = (source, target.dtype) if target.device.type == "cpu" else (target, source.dtype)
    if non_blocking and not same:
        return (target.numel() * dtype.itemsize,)
    return () if on_device.is_contiguous() else (target.numel() * on_device.dtype.itemsize,)


# ---- softmax and norms ----


def _softmax_backward(a: dict[str, Any], _result) -> list[int]:
    """SoftMax.cu: the product of gradient and output is made in memory of its own before the kernel."""
    grad, output = a["grad_output"], a["output"]
    product = grad.numel() * torch.promote_types(grad.dtype, output.dtype).itemsize
    return [product, *_copies(output)]


def _contiguous(*names: str) -> Callable[[dict[str, Any], Any], list[int]]:
    """SoftMax.cu, layer_norm_kernel.cu: these arguments are copied where they are not contiguous."""
    return lambda a, _result: _copies(*(a[name] for name in names))


def _copies(*tensors: torch.Tensor) -> list[int]:
    return [_bytes(tensor) for tensor in tensors if not tensor.is_contiguous()]


# ---- reductions ----


def _converted(a: dict[str, Any], result) -> list[int]:
    """ReduceOpsUtils.h: the input is converted to the result's dtype first, but for half precision to float."""
    source = a["self"]
    if source.dtype == result.dtype:
        return []
    if source.dtype in (torch.float16, torch.bfloat16) and result.dtype == torch.float32:
        return []
    return [source.numel() * result.dtype.itemsize]


def _scanned(a: dict[str, Any], result) -> list[int]:
    """ReduceOps.cpp: cumulative sums convert whatever has not the result's dtype."""
    source = a["self"]
    return [] if source.dtype == result.dtype else [source.numel() * result.dtype.itemsize]


# ---- matrix products ----


def _operands(*names: str) -> Callable[[dict[str, Any], Any], list[int]]:
    """Blas.cpp: an operand is copied where no leading dimension describes its rows or columns to cuBLAS."""
    return lambda a, _result: [_bytes(a[name]) for name in names if not _has_leading_dimension(a[name])]


def _has_leading_dimension(matrix: torch.Tensor) -> bool:
    rows, columns = matrix.shape[-2:]
    row_stride, column_stride = matrix.stride()[-2:]
    return (column_stride == 1 and row_stride >= max(1, columns)) or (row_stride == 1 and column_stride >= max(1, rows))


# ---- scattered additions ----


def _embedding_backward(a: dict[str, Any], _result) -> list[int]:
    """Embedding.cu and EmbeddingBackwardKernel.cu: indices are sorted, then runs of equal ones added up in float."""
    grad, indices, rows = a["grad_output"], a["indices"], a["num_weights"]
    copies = _copies(grad)
    count, scaled = indices.numel(), a.get("scale_grad_by_freq", False)
    if count <= _EMBEDDING_WITHOUT_SORT and not scaled:
        return copies
    index = indices.dtype.itemsize
    segments = min(count, rows)
    partial = count // _EMBEDDING_ROWS_PER_THREAD + segments
    itemsize = _FLOAT_BYTES if grad.dtype.itemsize < _FLOAT_BYTES else grad.dtype.itemsize
    ordered = [count * index] * (3 if scaled else 2)  # sorted, their places before, how often each appears
    adding = [count * index, segments * index, segments * index, partial * index, partial * grad.shape[-1] * itemsize]
    sorting = [count * index] * 3  # the places, and the second buffers of keys and values of the radix sort
    return copies + ordered + max(adding, sorting, key=sum)


def _index_put(a: dict[str, Any], _result) -> list[int]:
    """Indexing.cu, index_put_with_sort_kernel: to add without races the places are sorted."""
    indices = [index for index in a["indices"] if index is not None]
    if not a.get("accumulate", False) or not indices or any(i.dtype in (torch.bool, torch.uint8) for i in indices):
        return []
    shape = torch.broadcast_shapes(*(index.shape for index in indices))
    # Places in memory, sorted and as they were; while sorting their numbers and the sort's second buffers.
    return _copies(a["self"]) + [math.prod(shape) * torch.int64.itemsize] * 6


def _masked_scatter(a: dict[str, Any], _result) -> list[int]:
    """IndexKernel.cpp: how many elements are taken before each place."""
    target, mask = a["self"], a["mask"]
    count = math.prod(torch.broadcast_shapes(target.shape, mask.shape))
    return [count * torch.int64.itemsize] + ([count * mask.dtype.itemsize] if mask.numel() != count else [])


# ---- attention ----


def _flash_backward(a: dict[str, Any], _result) -> list[int]:
    """flash_attn/flash_api.cpp, mha_bwd: the gradient of the queries is added up in float, rounded up to whole tiles;
    with fewer heads of keys than of queries theirs are made for every head first."""
    if a.get("cum_seq_q") is not None:
        return []  # packed sequences: their lengths are values
    query, key = a["query"], a["key"]
    batch, heads, length, size = query.shape
    kept_heads, key_length = key.shape[1], key.shape[2]
    rounded = _round_up(length, 128)
    sizes = [batch * heads * rounded * _FLOAT_BYTES, batch * heads * rounded * _round_up(size, 32) * _FLOAT_BYTES]
    if kept_heads != heads:
        sizes += [batch * heads * key_length * size * key.dtype.itemsize] * 2
    return sizes


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


_RULES: dict[str, Callable[[dict[str, Any], Any], list[int]]] = {
    "_softmax": _contiguous("self"),
    "_log_softmax": _contiguous("self"),
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _contiguous("grad_output", "output"),
    "native_layer_norm": _contiguous("input"),
    "native_layer_norm_backward": _contiguous("grad_out", "input"),
    "_fused_rms_norm": _contiguous("input"),
    "_fused_rms_norm_backward": _contiguous("grad_out", "input"),
    "sum": _converted,
    "nansum": _converted,
    "mean": _converted,
    "prod": _converted,
    "cumsum": _scanned,
    "cumprod": _scanned,
    "mm": _operands("self", "mat2"),
    "addmm": _operands("mat1", "mat2"),
    "bmm": _operands("self", "mat2"),
    "baddbmm": _operands("batch1", "batch2"),
    "embedding_dense_backward": _embedding_backward,
    "index_put": _index_put,
    "_index_put_impl": _index_put,
    "masked_scatter": _masked_scatter,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
}
