"""Which attention kernel is chosen, and that it is the one that is recorded.

Expected choices are read from PyTorch's sdp_utils.cpp (2.9 and 2.14).
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from echo_hooks.devices.attention import CUDNN, EFFICIENT, FLASH, MATH, Request, choose
from echo_hooks.devices.libraries import cudnn_version, torch_release

A100, L40, H100, B200, V100 = (8, 0), (8, 9), (9, 0), (10, 0), (7, 0)


def request(
    capability=A100, head=64, dtype=torch.bfloat16, *, heads=4, key_heads=4, length=32, key_length=32, value_head=None,
    mask=False, dropout=0.0, causal=False, grouped=False, grad=True, cudnn=92400, release=(2, 14),
):  # fmt: skip
    def make(heads, length, head):
        return torch.empty(2, heads, length, head, dtype=dtype, device="meta", requires_grad=grad)

    query, key = make(heads, length, head), make(key_heads, key_length, head)
    value = make(key_heads, key_length, value_head or head)
    attn_mask = torch.empty(length, key_length, dtype=dtype, device="meta") if mask else None
    return Request(query, key, value, attn_mask, dropout, causal, grouped, capability, cudnn, release)


@pytest.mark.parametrize(
    "expected, changes",
    [
        (FLASH, {}),
        (FLASH, {"head": 256}),
        (FLASH, {"head": 36}),  # padded to 40
        (FLASH, {"causal": True}),
        (FLASH, {"key_heads": 2, "grouped": True}),
        (EFFICIENT, {"mask": True}),
        (EFFICIENT, {"dtype": torch.float32}),
        (EFFICIENT, {"head": 264}),
        (EFFICIENT, {"value_head": 32}),
        (EFFICIENT, {"causal": True, "key_length": 64}),
        (MATH, {"dtype": torch.float64}),
        (MATH, {"dtype": torch.float32, "head": 30}),  # not a multiple of 4
        (MATH, {"mask": True, "head": 36}),  # not a multiple of 8
        (MATH, {"mask": True, "key_heads": 2, "grouped": True, "release": (2, 9), "head": 160}),
        (EFFICIENT, {"mask": True, "key_heads": 2, "grouped": True, "head": 160}),
        (MATH, {"key_heads": 2}),  # heads differ and enable_gqa was not given
        # Hopper and Blackwell: cuDNN first
        (CUDNN, {"capability": H100}),
        (CUDNN, {"capability": B200}),
        (CUDNN, {"capability": H100, "mask": True}),
        (CUDNN, {"capability": H100, "cudnn": 91002, "release": (2, 9)}),
        (FLASH, {"capability": H100, "cudnn": 91002, "release": (2, 10)}),
        (CUDNN, {"capability": H100, "cudnn": 92000, "release": (2, 13)}),
        (CUDNN, {"capability": H100, "head": 192, "value_head": 128, "cudnn": 92000, "release": (2, 13)}),
        (FLASH, {"capability": H100, "head": 256, "cudnn": 92000, "release": (2, 13)}),
        (CUDNN, {"capability": H100, "head": 256}),
        (FLASH, {"capability": H100, "head": 160}),  # cuDNN has no backward for it
        (CUDNN, {"capability": H100, "head": 160, "grad": False}),
        (FLASH, {"capability": H100, "dropout": 0.1}),  # not a multiple of 1/16
        (CUDNN, {"capability": H100, "dropout": 0.125}),
        (FLASH, {"capability": H100, "head": 36}),
        (EFFICIENT, {"capability": H100, "dtype": torch.float32}),
        # workstation GPUs: no flash backward for large heads
        (EFFICIENT, {"capability": L40, "head": 200}),
        (FLASH, {"capability": L40, "head": 256}),
        (FLASH, {"capability": L40, "head": 200, "grad": False}),
        # before Ampere
        (EFFICIENT, {"capability": V100, "dtype": torch.float16}),
        (MATH, {"capability": V100, "dtype": torch.bfloat16}),
    ],
)
def test_choice(expected, changes):
    assert choose(request(**changes)) == expected


def test_enabled_flags_decide():
    with sdpa_kernel(SDPBackend.MATH):
        assert choose(request()) == MATH
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        assert choose(request()) == EFFICIENT
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="No available kernel"):
        choose(request(mask=True))


def test_priority_set_by_the_script():
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert choose(request()) == EFFICIENT


def tensors(dtype=torch.bfloat16, head=64, key_heads=4):
    return [
        torch.randn(2, heads, 32, head, device="cuda", dtype=dtype, requires_grad=True)
        for heads in (4, key_heads, key_heads)
    ]


@pytest.mark.parametrize(
    "backend, op",
    [
        (SDPBackend.FLASH_ATTENTION, "flash"),
        (SDPBackend.EFFICIENT_ATTENTION, "efficient"),
        (SDPBackend.CUDNN_ATTENTION, "cudnn"),
    ],
)
def test_forward_and_backward_record_the_fused_op(mode, backend, op):
    query, key, value = tensors()
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(query, key, value, dropout_p=0.125)
    assert out.shape == query.shape and out.dtype == query.dtype
    out.sum().backward()
    assert query.grad.shape == query.shape and value.grad.shape == value.shape
    assert f"_scaled_dot_product_{op}_attention" in mode.ops
    assert f"_scaled_dot_product_{op}_attention_backward" in mode.ops
    assert "bmm" not in mode.ops


def test_math_is_decomposed(mode):
    query, key, value = tensors(torch.float64)
    scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()
    assert "bmm" in mode.ops and "_softmax_backward_data" in mode.ops


def test_no_grad(mode):
    query, key, value = tensors()
    with torch.no_grad():
        out = scaled_dot_product_attention(query, key, value)
    assert not out.requires_grad and out.is_cuda


def test_boolean_mask(mode):
    query, key, value = tensors(torch.float32)
    mask = torch.ones(32, 32, dtype=torch.bool, device="cuda")
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    out.sum().backward()
    assert "where" in mode.ops and "_scaled_dot_product_efficient_attention" in mode.ops


def test_grouped_queries_and_padded_heads(mode):
    query, key, value = tensors(head=36, key_heads=2)
    out = scaled_dot_product_attention(query, key, value, enable_gqa=True)
    out.sum().backward()
    assert out.shape == query.shape
    assert key.grad.shape == key.shape
    assert "_scaled_dot_product_flash_attention" in mode.ops and "constant_pad_nd" in mode.ops


def test_mask_and_causal_together_are_refused(mode):
    query, key, value = tensors()
    with pytest.raises(RuntimeError, match="is_causal=True"):
        scaled_dot_product_attention(query, key, value, torch.ones(32, 32, device="cuda"), is_causal=True)


def test_multihead_attention_module_reaches_the_fused_op(mode):
    layer = torch.nn.TransformerEncoderLayer(64, 4, device="cuda", dtype=torch.bfloat16, batch_first=True)
    layer(torch.randn(2, 16, 64, device="cuda", dtype=torch.bfloat16)).sum().backward()
    assert any("attention_backward" in op for op in mode.ops)


def test_fused_choice_op(mode):
    query, key, value = tensors()
    expected = choose(Request(query, key, value, None, 0.0, False, False, (9, 0), cudnn_version(), torch_release()))
    assert torch._fused_sdp_choice(query, key, value) == expected


def test_cpu_attention_is_untouched(mode):
    out = scaled_dot_product_attention(*(torch.randn(1, 2, 4, 8) for _ in range(3)))
    assert out.device.type == "cpu" and out.abs().sum() > 0
