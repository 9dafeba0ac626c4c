"""The 8-bit state: contexts that switch it on, quantized tensors, maxima that are reduced among ranks."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from echo_megatron.te import kernels
from echo_megatron.te.recipes import DelayedScaling, MXFP8BlockScaling, Recipe


def get_default_fp8_recipe() -> Recipe:
    """Blocks of 32 on Blackwell and later, one delayed factor a tensor before."""
    return MXFP8BlockScaling() if torch.cuda.get_device_capability() >= (10, 0) else DelayedScaling()


def check_fp8_support() -> tuple[bool, str]:
    ok = torch.cuda.get_device_capability() >= (8, 9)
    return ok, "" if ok else "Device compute capability 8.9 or higher required for FP8 execution."


class FP8GlobalStateManager:
    """What is on at the moment. Scripts and Megatron ask it by these names."""

    FP8_ENABLED = False
    FP8_CALIBRATION = False
    FP8_RECIPE: Recipe | None = None
    FP8_DISTRIBUTED_GROUP: Any = None
    FP8_PARAMETERS = False
    FP8_AUTOCAST_DEPTH = 0
    IS_FIRST_FP8_MODULE = False
    # direction -> (group, number of maxima by module) of modules with delayed scaling that have run
    _maxima: dict[bool, dict[int, tuple[Any, int]]] = {True: {}, False: {}}
    quantization_state: Any = None

    @classmethod
    def reset(cls) -> None:
        cls.FP8_ENABLED = cls.FP8_CALIBRATION = cls.IS_FIRST_FP8_MODULE = False
        cls.FP8_RECIPE = cls.FP8_DISTRIBUTED_GROUP = None
        cls.FP8_AUTOCAST_DEPTH = 0
        cls._maxima = {True: {}, False: {}}

    @classmethod
    def is_fp8_available(cls) -> tuple[bool, str]:
        return check_fp8_support()

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.FP8_ENABLED

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return cls.FP8_CALIBRATION

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        return cls.FP8_PARAMETERS

    @classmethod
    def with_high_precision_init_val(cls) -> bool:
        return False

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        return False

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        return cls.FP8_RECIPE or get_default_fp8_recipe()

    @classmethod
    def get_fp8_group(cls):
        return cls.FP8_DISTRIBUTED_GROUP

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """True once in each context."""
        first, cls.IS_FIRST_FP8_MODULE = cls.IS_FIRST_FP8_MODULE, False
        return first

    @classmethod
    def get_fp8_autocast_state(cls):
        return (
            cls.FP8_ENABLED,
            cls.FP8_CALIBRATION,
            cls.FP8_RECIPE,
            cls.FP8_DISTRIBUTED_GROUP,
            cls.IS_FIRST_FP8_MODULE,
        )

    get_autocast_state = get_fp8_autocast_state

    @classmethod
    def set_fp8_autocast_state(cls, state) -> None:
        (
            cls.FP8_ENABLED,
            cls.FP8_CALIBRATION,
            cls.FP8_RECIPE,
            cls.FP8_DISTRIBUTED_GROUP,
            cls.IS_FIRST_FP8_MODULE,
        ) = state

    set_autocast_state = set_fp8_autocast_state

    @classmethod
    def add_maxima(cls, module, gemms: int) -> None:
        """A module with delayed scaling keeps three maxima forward and two backward for each product."""
        group = cls.FP8_DISTRIBUTED_GROUP
        cls._maxima[True][id(module)] = (group, 3 * gemms)
        cls._maxima[False][id(module)] = (group, 2 * gemms)

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """Largest values over the group's ranks, then the scaling factors: once for all modules that have run."""
        by_group: dict[Any, int] = {}
        for group, count in cls._maxima[forward].values():
            by_group[group] = by_group.get(group, 0) + count
        for group, count in by_group.items():
            maxima = torch.empty(count, dtype=torch.float32, device=torch.cuda.current_device())
            if group is not None and dist.is_initialized() and dist.get_world_size(group) > 1:
                dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
            kernels.update_scales_(maxima)


@contextlib.contextmanager
def fp8_autocast(enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None, _graph=False, **_):
    """Products inside run in 8 bits. Arguments as Transformer Engine's."""
    manager = FP8GlobalStateManager
    if enabled:
        ok, why = check_fp8_support()
        assert ok, why
    before = manager.get_fp8_autocast_state()
    manager.set_fp8_autocast_state(
        (enabled, calibrating, fp8_recipe or get_default_fp8_recipe(), fp8_group, enabled or before[-1])
    )
    manager.FP8_AUTOCAST_DEPTH += 1
    try:
        yield
    finally:
        manager.FP8_AUTOCAST_DEPTH -= 1
        manager.set_fp8_autocast_state(before)
        if enabled and manager.FP8_AUTOCAST_DEPTH == 0 and not _graph and torch.is_grad_enabled():
            manager.reduce_and_update_fp8_tensors(forward=True)


def autocast(enabled=True, calibrating=False, recipe=None, amax_reduction_group=None, **_):
    """The name since version 2.9."""
    return fp8_autocast(enabled, calibrating, recipe, amax_reduction_group)


@contextlib.contextmanager
def fp8_model_init(enabled=True, recipe=None, preserve_high_precision_init_val=False):
    if enabled:
        raise NotImplementedError("weights kept in 8 bits (fp8_model_init, --fp8-param-gather) are not simulated")
    yield


quantized_model_init = fp8_model_init


# ---- quantized tensors ----


@dataclass
class Quantized:
    """A matrix in 8 bits: ``rows`` [m, n], ``columns`` [n, m] its transposed copy; either may be missing.

    8-bit products take both operands along the inner dimension, so that the backward ones need transposed copies.
    """

    rows: torch.Tensor | None
    columns: torch.Tensor | None


def quantize(tensor: torch.Tensor, dtype: torch.dtype, *, rows: bool, columns: bool) -> Quantized:
    """Cast (and transpose) in one kernel."""
    if tensor.shape[0] % 8 or tensor.shape[1] % 16:
        raise AssertionError(
            "FP8 execution requires the product of all dimensions except the last to be divisible by 8 and the last"
            f" dimension to be divisible by 16, but got tensor with dims={list(tensor.shape)}"
        )
    a, b = kernels.quantize(tensor, dtype, rows, columns)
    return Quantized(a if rows else None, b if columns else None)


class QuantizedTensor(torch.Tensor):
    """For ``isinstance``: parameters in 8 bits are not simulated."""


class Float8Tensor(QuantizedTensor):
    pass


class MXFP8Tensor(QuantizedTensor):
    pass


class Float8BlockwiseQTensor(QuantizedTensor):
    pass


class NVFP4Tensor(QuantizedTensor):
    pass


QuantizedTensorBase = QuantizedTensorStorage = QuantizedTensor
