"""What all layers with weights share: parameters, their attributes, first micro-batches, delayed weight gradients."""

from __future__ import annotations

import queue
from collections.abc import Callable

import torch
from torch import nn

from echo_megatron.te.communication import size_of
from echo_megatron.te.precision import FP8GlobalStateManager, Quantized, quantize

_dummies: dict[tuple, torch.Tensor] = {}


def get_dummy_wgrad(shape, dtype, zero: bool = False) -> torch.Tensor:
    """What a fused weight gradient returns to autograd: one tensor a shape, never read."""
    key = (tuple(shape), dtype, torch.cuda.current_device())
    if key not in _dummies:
        _dummies[key] = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device(), requires_grad=False)
    if zero:
        _dummies[key].fill_(0)
    return _dummies[key].detach()


def get_workspace() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=torch.cuda.current_device())


class WeightGradStore:
    """Weight gradients put off until ``backward_dw``."""

    def __init__(self, delay: bool = False, ub_bulk_wgrad: bool = False):
        self.delay = delay
        self.waiting: queue.Queue = queue.Queue()

    def delay_wgrad_compute(self) -> bool:
        return self.delay

    def put(self, compute: Callable[[], None]) -> None:
        self.waiting.put(compute)

    def pop(self) -> None:
        self.waiting.get()()


class TransformerEngineBaseModule(nn.Module):
    """Layers with one or more products."""

    gemms = 1

    def __init__(self) -> None:
        super().__init__()
        self.fp8 = False
        self.fp8_calibration = False
        self.fp8_meta: dict = {"fp8_checkpoint": False, "recipe": None, "num_gemms": self.gemms}
        self.fp8_initialized = False
        self.primary_weights_in_fp8 = False
        self.save_original_input = False
        self.wgrad_store = WeightGradStore()
        self._cached_weights: dict[str, Quantized] = {}
        self.tp_group = None
        self.tp_size = 1
        self.tp_group_initialized = False
        self.sequence_parallel = False

    # ---- parameters ----

    def make_weight(self, name: str, shape, init_method, dtype, device, *, dim: int, rng_tracker=None, rng_name=None):
        """Register a weight cut along ``dim`` (-1: whole on each rank), initialised in its own random state."""
        weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        if init_method is None:
            init_method = _normal
        if device != "meta":
            if rng_tracker is None:
                init_method(weight.data)
            else:
                with rng_tracker().fork(rng_name) if rng_name else rng_tracker().fork():
                    init_method(weight.data)
        self.register_parameter(name, weight)
        _mark(weight, dim >= 0 and self.tp_size > 1, dim)

    def make_bias(self, name: str, size: int, dtype, device, *, parallel: bool, sequence_parallel: bool):
        bias = nn.Parameter(torch.zeros(size, dtype=dtype, device=device))
        self.register_parameter(name, bias)
        if parallel:
            _mark(bias, True, 0)
        elif sequence_parallel:
            bias.sequence_parallel = True

    def make_norm(self, normalization: str, size: int, dtype, device, zero_centered: bool, sequence_parallel: bool):
        """``layer_norm_weight`` and, for LayerNorm, ``layer_norm_bias``."""
        value = torch.zeros if zero_centered else torch.ones
        self.layer_norm_weight = nn.Parameter(value(size, dtype=dtype, device=device))
        self.layer_norm_weight.sequence_parallel = sequence_parallel
        self.layer_norm_bias = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = nn.Parameter(torch.zeros(size, dtype=dtype, device=device))
            self.layer_norm_bias.sequence_parallel = sequence_parallel

    # ---- state ----

    def set_tensor_parallel_group(self, tp_group) -> None:
        self.tp_group = tp_group
        self.tp_group_initialized = True

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        self.fp8_meta["num_gemms"] = num_gemms

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state) -> None:
        pass

    def backward_dw(self) -> None:
        """The weight gradients that were put off."""
        if self.wgrad_store.delay_wgrad_compute():
            self.wgrad_store.pop()

    def begin_forward(self, tensor: torch.Tensor) -> torch.dtype:
        """Note the 8-bit state; the dtype that the products run in otherwise."""
        manager = FP8GlobalStateManager
        self.fp8 = manager.is_fp8_enabled()
        if self.fp8:
            self.fp8_meta["recipe"] = manager.get_fp8_recipe()
            if manager.get_fp8_recipe().delayed():
                manager.add_maxima(self, self.gemms)
        if self.tp_size > 1 and self.tp_group is not None:
            assert size_of(self.tp_group) == self.tp_size, "TP group not initialized."
        if torch.is_autocast_enabled():
            return torch.get_autocast_gpu_dtype()
        return tensor.dtype

    def quantized_weight(self, name: str, weight: torch.Tensor, dtype, first: bool | None, columns: bool) -> Quantized:
        """A weight in 8 bits: cast in the first micro-batch and kept, or each time where ``first`` is None."""
        cached = self._cached_weights.get(name)
        if first is None:
            return quantize(weight, dtype, rows=True, columns=columns)
        if cached is None or first or (columns and cached.columns is None):
            self._cached_weights[name] = cached = quantize(weight, dtype, rows=True, columns=columns)
        return cached


def _normal(weight: torch.Tensor) -> None:
    nn.init.normal_(weight, mean=0.0, std=0.023)


def _mark(tensor: torch.Tensor, parallel: bool, dim: int) -> None:
    tensor.tensor_model_parallel = parallel
    tensor.partition_dim = dim
    tensor.partition_stride = 1
