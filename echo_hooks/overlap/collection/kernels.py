"""The kernels that are measured: what training launches, of every class and many shapes, on random data.

Each is one ATen operation. A builder makes its tensors on a device and returns the call; what the library of this
machine cannot do is left out with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from echo_hooks.capture.costs import signature
from echo_hooks.graph.ops import OpSignature

Builder = Callable[[torch.device], Callable[[], Any]]

aten = torch.ops.aten
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


def kernels() -> dict[str, Builder]:
    """Builders by name; the name (class and shape) identifies a kernel in samples and hold-outs."""
    return {**_products(), **_attention(), **_rows(), **_pointwise(), **_others()}


def signature_of(call: Callable[[], Any]) -> OpSignature:
    """Signature of the heaviest operation that ``call`` issues, as the recorder of a run would describe it."""
    with _Seen() as seen:
        call()
    if not seen.found:
        raise ValueError("the call launches nothing")
    return max(seen.found, key=lambda op: op.flops + op.bytes_read + op.bytes_written)


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[OpSignature] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        returns = func._schema.returns
        if any(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            return result  # a view: nothing runs
        written = []
        for value, argument in zip(args, func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += [value] if isinstance(value, torch.Tensor) else [t for t in value or () if t is not None]
        self.found.append(signature(func, args, kwargs, result, written))
        return result


def _random(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = bf16) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=dtype)


# ---- products ----

_GEMMS = (
    (1024, 1024, 1024), (1536, 1536, 1536), (2048, 2048, 2048), (3072, 3072, 3072), (4096, 4096, 4096),
    (5120, 5120, 5120), (8192, 8192, 8192), (4096, 2048, 8192), (4096, 8192, 2048), (8192, 2048, 2048),
    (8192, 6144, 2048), (8192, 2048, 8192), (2048, 4096, 1024), (4096, 12288, 4096), (16384, 4096, 4096),
    (512, 4096, 4096), (1024, 8192, 4096), (4096, 50304, 2048), (2048, 5120, 13824), (16384, 1024, 1024),
    (4096, 4096, 1024), (2048, 8192, 2048), (8192, 8192, 1024), (6144, 6144, 6144), (4096, 11008, 4096),
    (2048, 2048, 8192), (32768, 2048, 2048), (1280, 5120, 1280), (8192, 1024, 4096), (2048, 6144, 2048),
)  # fmt: skip


def _products() -> dict[str, Builder]:
    found: dict[str, Builder] = {f"gemm_{m}x{n}x{k}": _mm(m, n, k) for m, n, k in _GEMMS}
    found["gemm_tn_2048x8192x8192"] = _mm_transposed(2048, 8192, 8192)
    found["gemm_nt_8192x4096x4096"] = _mm_other_transposed(8192, 4096, 4096)
    found["gemm_fp16_4096x4096x2048"] = _mm(4096, 4096, 2048, fp16)
    for n in (2048, 3072):
        found[f"gemm_fp32_{n}"] = _mm(n, n, n, fp32)
    found["gemm_fp32_1024"] = _mm(1024, 1024, 1024, fp32)
    found["gemm_fp16_8192x3072x1024"] = _mm(8192, 3072, 1024, fp16)
    found["bmm_32x2048x2048x128"] = _bmm(32, 2048, 2048, 128)
    found["bmm_32x2048x128x2048"] = _bmm(32, 2048, 128, 2048)
    found["addmm_8192x8192x2048"] = _addmm(8192, 8192, 2048)
    found["bmm_64x1024x1024x64"] = _bmm(64, 1024, 1024, 64)
    found["bmm_128x1024x64x1024"] = _bmm(128, 1024, 64, 1024)
    return found


def _mm(m: int, n: int, k: int, dtype: torch.dtype = bf16) -> Builder:
    def build(device):
        a, b = _random((m, k), device, dtype), _random((k, n), device, dtype)
        return lambda: torch.mm(a, b)

    return build


def _mm_transposed(m: int, n: int, k: int) -> Builder:
    def build(device):
        a, b = _random((k, m), device).t(), _random((k, n), device)
        return lambda: torch.mm(a, b)

    return build


def _mm_other_transposed(m: int, n: int, k: int) -> Builder:
    def build(device):
        a, b = _random((m, k), device), _random((n, k), device).t()
        return lambda: torch.mm(a, b)

    return build


def _addmm(m: int, n: int, k: int) -> Builder:
    def build(device):
        a, b, bias = _random((m, k), device), _random((n, k), device).t(), _random((n,), device)
        return lambda: torch.addmm(bias, a, b)

    return build


def _bmm(batch: int, m: int, n: int, k: int) -> Builder:
    def build(device):
        a, b = _random((batch, m, k), device), _random((batch, k, n), device)
        return lambda: torch.bmm(a, b)

    return build


# ---- attention ----


def _attention() -> dict[str, Builder]:
    shapes = (
        (2, 16, 2048, 128, True), (8, 16, 1024, 64, True), (4, 32, 4096, 128, True), (1, 32, 8192, 128, True),
        (4, 16, 2048, 64, False), (2, 12, 1024, 64, True), (4, 16, 2048, 128, False), (1, 16, 4096, 64, True),
        (16, 12, 512, 64, True), (2, 40, 2048, 128, True), (8, 16, 512, 64, False), (1, 24, 2048, 128, True),
    )  # fmt: skip
    found: dict[str, Builder] = {}
    for b, h, s, d, causal in shapes:
        found[f"sdpa{'' if causal else '_full'}_{b}x{h}x{s}x{d}"] = _sdpa(b, h, s, d, causal)
    for b, h, s, d in ((2, 16, 2048, 128), (8, 16, 1024, 64), (4, 16, 2048, 128), (4, 12, 1024, 64)):
        found[f"sdpa_backward_{b}x{h}x{s}x{d}"] = _sdpa_backward(b, h, s, d)
    return found


def _sdpa(b: int, h: int, s: int, d: int, causal: bool) -> Builder:
    def build(device):
        q, k, v = (_random((b, s, h, d), device).transpose(1, 2) for _ in range(3))
        return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return build


def _sdpa_backward(b: int, h: int, s: int, d: int) -> Builder:
    def build(device):
        q, k, v, g = (_random((b, s, h, d), device).transpose(1, 2) for _ in range(4))
        out, lse, cum_q, cum_k, most_q, most_k, seed, offset, _ = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, True, False
        )
        return lambda: aten._scaled_dot_product_flash_attention_backward(
            g, q, k, v, out, lse, cum_q, cum_k, most_q, most_k, 0.0, True, seed, offset
        )

    return build


# ---- rows ----


def _rows() -> dict[str, Builder]:
    found: dict[str, Builder] = {}
    for rows, width in (
        (4096, 2048),
        (8192, 4096),
        (16384, 4096),
        (8192, 8192),
        (32768, 1024),
        (8192, 12288),
        (16384, 2048),
    ):
        found[f"layernorm_{rows}x{width}"] = _layer_norm(rows, width)
    for rows, width in ((8192, 2048), (16384, 4096), (4096, 8192)):
        found[f"layernorm_backward_{rows}x{width}"] = _layer_norm_backward(rows, width)
    for rows, width in ((8192, 4096), (16384, 5120)):
        found[f"rmsnorm_{rows}x{width}"] = _rms_norm(rows, width)
    for rows, width in ((4096, 8192), (16384, 2048), (8192, 16384), (65536, 1024), (8192, 2048), (32768, 4096)):
        found[f"softmax_{rows}x{width}"] = _softmax(rows, width, bf16)
    found["log_softmax_fp32_4096x50304"] = _log_softmax(4096, 50304)
    for rows, width in ((4096, 8192), (65536, 1024)):
        found[f"softmax_backward_{rows}x{width}"] = _softmax_backward(rows, width)
    return found


def _layer_norm(rows: int, width: int) -> Builder:
    def build(device):
        x, w, b = _random((rows, width), device), _random((width,), device), _random((width,), device)
        return lambda: torch.nn.functional.layer_norm(x, (width,), w, b)

    return build


def _layer_norm_backward(rows: int, width: int) -> Builder:
    def build(device):
        x, g = _random((rows, width), device), _random((rows, width), device)
        w, b = _random((width,), device), _random((width,), device)
        _, mean, rstd = aten.native_layer_norm(x, (width,), w, b, 1e-5)
        mask = [True, True, True]
        return lambda: aten.native_layer_norm_backward(g, x, (width,), mean, rstd, w, b, mask)

    return build


def _rms_norm(rows: int, width: int) -> Builder:
    def build(device):
        x, w = _random((rows, width), device), _random((width,), device)
        return lambda: aten._fused_rms_norm(x, [width], w, 1e-5)

    return build


def _softmax(rows: int, width: int, dtype: torch.dtype) -> Builder:
    def build(device):
        x = _random((rows, width), device, dtype)
        return lambda: aten._softmax(x, -1, False)

    return build


def _log_softmax(rows: int, width: int) -> Builder:
    def build(device):
        x = _random((rows, width), device, fp32)
        return lambda: aten._log_softmax(x, -1, False)

    return build


def _softmax_backward(rows: int, width: int) -> Builder:
    def build(device):
        y, g = torch.softmax(_random((rows, width), device), -1), _random((rows, width), device)
        return lambda: aten._softmax_backward_data(g, y, -1, bf16)

    return build


# ---- pointwise ----


def _pointwise() -> dict[str, Builder]:
    def binary(op, shape, dtype=bf16) -> Builder:
        def build(device):
            a, b = _random(shape, device, dtype), _random(shape, device, dtype)
            return lambda: op(a, b)

        return build

    def unary(op, shape, dtype=bf16) -> Builder:
        def build(device):
            a = _random(shape, device, dtype)
            return lambda: op(a)

        return build

    def bias(shape) -> Builder:
        def build(device):
            a, b = _random(shape, device), _random(shape[-1:], device)
            return lambda: torch.add(a, b)

        return build

    million = 1 << 20
    return {
        "add_2048x2048": binary(torch.add, (2048, 2048)),
        "add_4096x8192": binary(torch.add, (4096, 8192)),
        "add_16384x8192": binary(torch.add, (16384, 8192)),
        "add_fp32_8M": binary(torch.add, (8 * million,), fp32),
        "add_fp32_64M": binary(torch.add, (64 * million,), fp32),
        "mul_8192x4096": binary(torch.mul, (8192, 4096)),
        "mul_16384x5120": binary(torch.mul, (16384, 5120)),
        "accumulate_fp32_32M": binary(lambda a, b: a.add_(b, alpha=1e-9), (32 * million,), fp32),
        "accumulate_bf16_128M": binary(lambda a, b: a.add_(b, alpha=1e-3), (128 * million,)),
        "axpy_fp32_128M": binary(lambda a, b: torch.add(a, b, alpha=0.5), (128 * million,), fp32),
        "add_8192x2048": binary(torch.add, (8192, 2048)),
        "mul_4096x4096": binary(torch.mul, (4096, 4096)),
        "scale_4096x8192": unary(lambda x: x * 0.5, (4096, 8192)),
        "scale_fp32_64M": unary(lambda x: x * 0.5, (64 * million,), fp32),
        "relu_8192x8192": unary(torch.relu, (8192, 8192)),
        "tanh_8192x4096": unary(torch.tanh, (8192, 4096)),
        "gelu_8192x2048": unary(torch.nn.functional.gelu, (8192, 2048)),
        "silu_4096x8192": unary(torch.nn.functional.silu, (4096, 8192)),
        "bias_16384x4096": bias((16384, 4096)),
        "gelu_4096x8192": unary(torch.nn.functional.gelu, (4096, 8192)),
        "gelu_16384x8192": unary(torch.nn.functional.gelu, (16384, 8192)),
        "gelu_backward_8192x8192": binary(lambda g, x: aten.gelu_backward(g, x), (8192, 8192)),
        "silu_8192x11008": unary(torch.nn.functional.silu, (8192, 11008)),
        "cast_to_fp32_8192x8192": unary(lambda x: x.to(fp32), (8192, 8192)),
        "cast_to_bf16_8192x8192": unary(lambda x: x.to(bf16), (8192, 8192), fp32),
        "clone_8192x16384": unary(torch.clone, (8192, 16384)),
        "transpose_8192x8192": unary(lambda x: x.t().contiguous(), (8192, 8192)),
        "dropout_16384x4096": unary(lambda x: aten.native_dropout(x, 0.1, True), (16384, 4096)),
        "abs_fp32_16M": unary(torch.abs, (16 * million,), fp32),
    }


# ---- others ----


def _others() -> dict[str, Builder]:
    def sum_rows(device):
        x = _random((16384, 4096), device)
        return lambda: torch.sum(x, 0)

    def sum_all(device):
        x = _random((1 << 27,), device)
        return lambda: torch.sum(x)

    def embedding(device):
        table, index = _random((50304, 2048), device), torch.randint(50304, (8192,), device=device)
        return lambda: torch.nn.functional.embedding(index, table)

    def embedding_wide(device):
        table, index = _random((128256, 4096), device), torch.randint(128256, (16384,), device=device)
        return lambda: torch.nn.functional.embedding(index, table)

    def cat(device):
        a, b = _random((8192, 4096), device), _random((8192, 4096), device)
        return lambda: torch.cat([a, b], -1)

    def zero(device):
        x = _random((1 << 28,), device)
        return lambda: x.zero_()

    def adamw(device, count=12, width=2048):
        def tensors(dtype=fp32):
            return [_random((width, width), device, dtype) for _ in range(count)]

        params, grads, m = tensors(), tensors(), tensors()
        v = [t.abs() for t in tensors()]
        steps = [torch.ones((), device=device) for _ in params]
        options: dict[str, Any] = {
            "lr": 1e-6, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False,
            "maximize": False,
        }  # fmt: skip
        return lambda: torch._fused_adamw_(params, grads, m, v, [], steps, **options)

    def foreach_mul(device):
        tensors = [_random((1024, 4096), device) for _ in range(16)]
        return lambda: torch._foreach_mul_(tensors, 0.999)

    return {
        "sum_rows_16384x4096": sum_rows,
        "sum_all_128M": sum_all,
        "embedding_8192_50304x2048": embedding,
        "embedding_16384_128256x4096": embedding_wide,
        "cat_8192x4096x2": cat,
        "zero_256M": zero,
        "adamw_12x4M": adamw,
        "adamw_4x1M": lambda device: adamw(device, 4, 1024),
        "foreach_mul_16x4M": foreach_mul,
    }
