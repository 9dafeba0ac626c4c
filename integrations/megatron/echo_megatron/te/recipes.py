"""Recipes of 8-bit training: what a script says about scaling factors. Only what changes work is looked at."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    """Formats of forward and backward tensors; values are the largest numbers of each."""

    E4M3 = _FormatHelper(448, 448)
    E5M2 = _FormatHelper(57344, 57344)
    HYBRID = _FormatHelper(448, 57344)
    E2M1 = _FormatHelper(6, 6)


@dataclass
class MMParams:
    use_split_accumulator: bool = True


class Recipe:
    """Base of all recipes."""

    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def delayed(self) -> bool:
        return isinstance(self, DelayedScaling)

    def float8_current_scaling(self) -> bool:
        return isinstance(self, Float8CurrentScaling)

    def float8_per_tensor_scaling(self) -> bool:
        return self.delayed() or self.float8_current_scaling()

    def mxfp8(self) -> bool:
        return isinstance(self, MXFP8BlockScaling)

    def float8_block_scaling(self) -> bool:
        return isinstance(self, Float8BlockScaling)

    def nvfp4(self) -> bool:
        return isinstance(self, NVFP4BlockScaling)

    def custom(self) -> bool:
        return isinstance(self, CustomRecipe)

    def dtype(self, forward: bool) -> torch.dtype:
        """Of the quantized tensors of a direction."""
        backward_range = self.fp8_format is Format.E5M2 or (self.fp8_format is Format.HYBRID and not forward)
        return torch.float8_e5m2 if backward_range else torch.float8_e4m3fn


@dataclass(repr=False)
class DelayedScaling(Recipe):
    margin: int = 0
    interval: int = -1
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    override_linear_precision: tuple = (False, False, False)
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    params_dtype: Any = None  # Megatron hands its layers' arguments through
    device: Any = None


@dataclass(repr=False)
class Float8CurrentScaling(Recipe):
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = field(default_factory=MMParams)
    fp8_gemm_dgrad: MMParams = field(default_factory=MMParams)
    fp8_gemm_wgrad: MMParams = field(default_factory=MMParams)
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass(repr=False)
class MXFP8BlockScaling(Recipe):
    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass(repr=False)
class Float8BlockScaling(Recipe):
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_dpa: bool = False
    fp8_mha: bool = False


class NVFP4BlockScaling(Recipe):
    def __init__(self, *args, **kwargs):
        raise NotImplementedError("4-bit training (NVFP4) is not simulated; take an 8-bit recipe")


class CustomRecipe(Recipe):
    def __init__(self, *args, **kwargs):
        raise NotImplementedError("custom quantization recipes are not simulated; take one of Transformer Engine's own")
