"""Which attention kernel a GPU would run: ``scaled_dot_product_attention`` without a device to ask.

The fused ops have shape functions for every device; only the choice among them needs a GPU. It is made here after
``select_sdp_backend`` of PyTorch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, for dense inputs.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass

import torch

from echo_hooks.devices.libraries import cudnn_version, torch_release
from echo_hooks.devices.properties import capability
from echo_hooks.devices.state import active

# at::SDPBackend (ATen/SDPBackend.h)
MATH, FLASH, EFFICIENT, CUDNN = 0, 1, 2, 3
_DEFAULT_ORDER = [FLASH, EFFICIENT, MATH, CUDNN]

_HALF = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten


@dataclass(frozen=True)
class Request:
    """What the choice depends on; tensors are (batch, heads, length, head size)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    grouped: bool
    capability: tuple[int, int]
    cudnn: int
    """cuDNN's version as a number (9.10.2 is 91002)."""
    release: tuple[int, int]
    """torch's version, whose rules apply."""

    @property
    def requires_grad(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))


def choose(request: Request) -> int:
    """The first usable backend in torch's own order of priority.

    Raises RuntimeError when none is, as torch does.
    """
    usable = {
        FLASH: torch.backends.cuda.flash_sdp_enabled() and _flash(request),
        EFFICIENT: torch.backends.cuda.mem_efficient_sdp_enabled() and _efficient(request),
        CUDNN: torch.backends.cuda.cudnn_sdp_enabled() and _cudnn(request),
        MATH: torch.backends.cuda.math_sdp_enabled(),
    }
    for backend in _priority(request):
        if usable.get(backend):
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def _priority(request: Request) -> list[int]:
    """The order that sdpa_kernel(set_priority=True) has set; by default cuDNN comes first on Hopper and Blackwell."""
    order = list(torch._C._get_sdp_priority_order())
    if order[:4] == _DEFAULT_ORDER and _prefers_cudnn(request):
        return [CUDNN, FLASH, EFFICIENT, MATH]
    return order


def _prefers_cudnn(r: Request) -> bool:
    """check_prefer_cudnn_attention: in 2.9 with cuDNN from 9.9 on, later with cuDNN after 9.15.0."""
    if r.release < (2, 10):
        wanted = os.environ.get("TORCH_CUDNN_SDPA_PREFERRED") != "0" and r.cudnn >= 90900
        return wanted and r.capability in ((9, 0), (10, 0))
    wanted = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1" and r.cudnn > 91500
    return wanted and r.capability in ((9, 0), (10, 0), (10, 3))


def _flash(r: Request) -> bool:
    head = r.query.size(-1)
    return (
        r.capability >= (8, 0)
        and r.query.dtype in _HALF
        and r.query.dim() == 4
        and r.mask is None
        and head <= 256
        and head == r.key.size(-1) == r.value.size(-1)
        and not (r.causal and r.query.size(-2) != r.key.size(-2))
        and not _too_wide_for_backward(r)
        and _heads_match(r, grouped=r.grouped)
        and _nonempty(r)
        and _last_stride_is_one(r)
    )


def _too_wide_for_backward(r: Request) -> bool:
    """Gaming and workstation GPUs lack the shared memory for the backward of large heads."""
    if not (r.requires_grad and ((8, 6) <= r.capability <= (8, 9) or r.capability >= (12, 0))):
        return False
    head = r.query.size(-1)
    return head > 192 and (r.dropout > 0 or head <= 224)


def _efficient(r: Request) -> bool:
    half = r.query.dtype in _HALF
    dtypes = (*_HALF, torch.float32) if r.capability >= (8, 0) else (torch.float16, torch.float32)
    if r.capability >= (8, 0):
        alignment = 8 if half else 4
    else:
        alignment = 8 if half and r.capability >= (7, 0) else 1
    head, value_head = r.query.size(-1), r.value.size(-1)
    return (
        r.query.dtype in dtypes
        and r.query.dim() == 4
        and head == r.key.size(-1)
        and head > 0
        and value_head > 0
        and head % alignment == 0
        and value_head % alignment == 0
        # Fewer heads of key and value: accepted in the source of 2.14, refused in that of 2.9.
        and _heads_match(r, grouped=r.grouped and r.release >= (2, 14))
        and _nonempty(r)
        and _last_stride_is_one(r)
    )


def _cudnn(r: Request) -> bool:
    return (
        r.capability >= (8, 0)
        and r.query.dtype in _HALF
        and r.query.dim() == 4
        and not torch.are_deterministic_algorithms_enabled()
        # The resolution of its dropout. torch 2.11 does not ask: seen on an H200, as tests/devices/test_real_gpu.py.
        and (r.release < (2, 12) or (r.dropout * 16).is_integer())
        and not (r.dropout > 0 and 91100 < r.cudnn < 91400)
        and _cudnn_takes_heads(r)
        and r.key.size(-2) > 1
        and not (r.dropout > 0 and r.query.size(-2) == 1)
        and _heads_match(r, grouped=r.grouped)
        and _nonempty(r)
        and _last_stride_is_one(r)
    )


def _cudnn_takes_heads(r: Request) -> bool:
    """Head sizes: multiples of 8 up to 128; larger ones on Hopper and Blackwell with newer cuDNN."""
    head, value_head = r.query.size(-1), r.value.size(-1)
    large = r.capability == (9, 0) or r.capability[0] == 10
    if large and r.cudnn > 92200 and r.release >= (2, 14):
        limit = 256
        backward = max(head, value_head) <= 128 or (head, value_head) in ((192, 128), (256, 256))
        if r.requires_grad and not backward:
            return False
    elif r.capability == (9, 0) and r.cudnn >= 91000 and r.release < (2, 12):
        limit = 256  # seen on an H200 with torch 2.11 and cuDNN 9.19
    elif large and r.cudnn >= 91100 and (head, value_head) == (192, 128):
        limit = 192
    else:
        limit = 128
    return max(head, value_head) <= limit and head % 8 == 0 and value_head % 8 == 0


def _heads_match(r: Request, grouped: bool) -> bool:
    """Equal batch and heads, or if ``grouped`` a whole number of query heads for each of key and value."""
    heads, key_heads, value_heads = r.query.size(-3), r.key.size(-3), r.value.size(-3)
    if not r.query.size(0) == r.key.size(0) == r.value.size(0):
        return False
    if grouped:
        return key_heads == value_heads and heads % key_heads == 0
    return heads == key_heads == value_heads


def _nonempty(r: Request) -> bool:
    return r.query.size(-2) > 0 and r.key.size(-2) > 0


def _last_stride_is_one(r: Request) -> bool:
    tensors = (r.query, r.key, r.value) + (() if r.mask is None else (r.mask,))
    return all(t.stride(-1) == 1 or t.size(-1) == 1 for t in tensors)


# ---- the op ----


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """aten::scaled_dot_product_attention for CUDA tensors: the fused op that the GPU would run.

    Padding and masks as in ``scaled_dot_product_attention`` of aten/src/ATen/native/transformers/attention.cpp.
    """
    if attn_mask is not None and is_causal:
        raise RuntimeError("_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True")
    backend = attention_choice(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if backend == MATH:
        return _aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    scale = query.size(-1) ** -0.5 if scale is None else scale  # of the head size before it is padded
    if backend == FLASH:
        head = query.size(-1)
        query, key, value = (_padded(t) for t in (query, key, value))
        out = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out if out.size(-1) == head else out[..., :head]
    mask = _float_mask(attn_mask, query)
    with_sums = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if backend == CUDNN:
        return _aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, with_sums, dropout_p, is_causal, False, scale=scale
        )[0]
    if mask is not None:
        mask = _aligned_mask(mask).expand(*query.shape[:3], key.size(2))
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, with_sums, dropout_p, is_causal, scale=scale
    )[0]


def attention_choice(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
):
    """aten::_fused_sdp_choice for CUDA tensors."""
    version = capability(active().accelerator)
    return choose(
        Request(
            query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, version, cudnn_version(), torch_release()
        )
    )


class AttentionKernels:
    """Registers the two ops with torch's dispatcher, for autograd and below it; ``remove`` takes them out again."""

    def __init__(self) -> None:
        self._library: torch.library.Library | None = None

    def install(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            # On the CUDA wheel the real kernels are overridden on purpose.
            warnings.simplefilter("ignore")
            for key in ("AutogradCUDA", "CUDA"):
                self._library.impl("scaled_dot_product_attention", attention, key)
                self._library.impl("_fused_sdp_choice", attention_choice, key)

    def remove(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """Head size padded to a multiple of 8, as flash attention needs it (pad_last_dim)."""
    missing = -tensor.size(-1) % 8
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _float_mask(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """A boolean mask as what is added to the scores: 0 where it is true, minus infinity elsewhere."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    outside = torch.scalar_tensor(float("-inf"), dtype=query.dtype, device=mask.device)
    return torch.where(mask, 0.0, outside)


def _aligned_mask(mask: torch.Tensor) -> torch.Tensor:
    """The mask with rows that start at multiples of 8 elements: a padded copy where they do not (preprocess_mask)."""
    if mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    padded = torch.nn.functional.pad(mask, (0, 8 - mask.size(-1) % 8))
    return padded[..., : mask.size(-1)]
