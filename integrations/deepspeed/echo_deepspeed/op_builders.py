"""Stand-ins for the extensions that DeepSpeed compiles on first use: they need a compiler and the device's driver.

Each serves the calls that DeepSpeed's own Python makes and records the kernels that would run.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from echo_deepspeed import kernels
from echo_hooks.devices.pretended import Pretended
from echo_hooks.errors import UsageError
from echo_hooks.patching import Patch


def patches(module: ModuleType) -> list[Patch]:
    """For deepspeed.ops.op_builder.builder: no op is compiled or loaded, its stand-in answers."""

    def make(_original) -> Callable[..., Any]:
        return lambda builder, verbose=False: stand_in(builder.name)

    return [Patch(module.OpBuilder, "load", make, "compiles an extension for a device that is not there", "0.16")]


def stand_in(name: str) -> Any:
    """What ``OpBuilder.load()`` gives for the builder of this name: an object with the extension's functions."""
    table = _EXTENSIONS.get(name, {})
    return _Extension(name, table)


class _Extension(SimpleNamespace):
    """Functions of one extension; asked for one that Echo does not stand in for, it says so."""

    def __init__(self, name: str, table: dict[str, Any]):
        super().__init__(**table)
        self.__dict__["_name"] = name

    def __getattr__(self, function: str) -> Any:
        if function.startswith("__"):
            raise AttributeError(function)
        raise UsageError(
            f"DeepSpeed's compiled op {self.__dict__['_name']} ({function}) cannot run on a pretended device, and Echo "
            "has no stand-in for it: choose what does without it"
        )


# ---- optimizers on the device ----


def _multi_tensor_adam(_chunk_size, _overflow, lists, *_hyperparameters) -> None:
    kernels.adam_(*lists)


def _multi_tensor_lion(_chunk_size, _overflow, lists, *_hyperparameters) -> None:
    kernels.lion_(*lists)


def _lamb(param, low_precision_copy, exp_avg, exp_avg_sq, grad, *_hyperparameters):
    return kernels.lamb_(param, exp_avg, exp_avg_sq, grad)


# ---- optimizers on the host ----


def _adam_update(_id, step, lr, beta1, beta2, eps, weight_decay, bias_correction, param, grad, exp_avg, exp_avg_sq):
    if _pretended(param, grad, exp_avg, exp_avg_sq):
        kernels.host_adam_(param, grad, exp_avg, exp_avg_sq)
        return
    update = grad.to(exp_avg.dtype)
    param.mul_(1 - lr * weight_decay)
    exp_avg.lerp_(update, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(update, update, value=1 - beta2)
    corrections = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    param.addcdiv_(exp_avg, (exp_avg_sq / corrections[1]).sqrt_().add_(eps), value=-lr / corrections[0])


def _adagrad_update(_id, _step, lr, eps, weight_decay, param, grad, sums):
    if _pretended(param, grad, sums):
        kernels.host_update_(param, grad, sums)
        return
    update = grad.add(param, alpha=weight_decay)
    sums.addcmul_(update, update)
    param.addcdiv_(update, sums.sqrt().add_(eps), value=-lr)


def _lion_update(_id, _step, lr, beta1, beta2, weight_decay, param, grad, exp_avg):
    if _pretended(param, grad, exp_avg):
        kernels.host_update_(param, grad, exp_avg)
        return
    param.mul_(1 - lr * weight_decay).add_(exp_avg.lerp(grad, 1 - beta1).sign_(), alpha=-lr)
    exp_avg.lerp_(grad, 1 - beta2)


def _pretended(*tensors: torch.Tensor) -> bool:
    return any(isinstance(tensor, Pretended) for tensor in tensors)


def _nothing(*_arguments, **_named) -> int:
    return 0


# ---- quantization ----

_SYMMETRIC, _ASYMMETRIC = 0, 1  # the second keeps an offset beside each scale


def _quantize(values, groups, bits, kind):
    return list(kernels.quantize(values, groups, bits, kind))


def _dequantize(values, scales, _groups, bits, _kind):
    return kernels.dequantize(values, scales, bits, torch.float16)


def _dequantize_fp32(values, scales, _groups, bits, _kind):
    return kernels.dequantize(values, scales, bits, torch.float32)


def _swizzle_quant(values, groups, bits, kind, _pipeline, _nodes, _devices):
    return list(kernels.swizzle(values, groups, bits, kind))


def _loco_swizzle_quant(values, _feedback, _beta, groups, bits, kind, *_shape):
    return list(kernels.swizzle(values, groups, bits, kind))


def _quantized_reduction(values, scales, _in_groups, out_groups, _bits, kind, devices):
    return list(kernels.quantized_sum(values, scales, out_groups, devices, kind))


def _loco_quantized_reduction(values, scales, _feedback, _beta, _in_groups, out_groups, _bits, kind, devices):
    return list(kernels.quantized_sum(values, scales, out_groups, devices, kind))


_EXTENSIONS: dict[str, dict[str, Any]] = {
    "fused_adam": {"multi_tensor_adam": _multi_tensor_adam},
    "fused_lion": {"multi_tensor_lion": _multi_tensor_lion},
    "fused_lamb": {"lamb": _lamb},
    "cpu_adam": {"create_adam": _nothing, "adam_update": _adam_update, "destroy_adam": _nothing},
    "cpu_adagrad": {"create_adagrad": _nothing, "adagrad_update": _adagrad_update, "destroy_adagrad": _nothing},
    "cpu_lion": {"create_lion": _nothing, "lion_update": _lion_update, "destroy_lion": _nothing},
    "utils": {"flatten": torch._utils._flatten_dense_tensors, "unflatten": torch._utils._unflatten_dense_tensors},
    "quantizer": {
        "Symmetric": _SYMMETRIC,
        "Asymmetric": _ASYMMETRIC,
        "quantize": _quantize,
        "dequantize": _dequantize,
        "dequantize_fp32": _dequantize_fp32,
        "swizzle_quant": _swizzle_quant,
        "loco_swizzle_quant": _loco_swizzle_quant,
        "quantized_reduction": _quantized_reduction,
        "loco_quantized_reduction": _loco_quantized_reduction,
    },
}
"""Builder's name -> the functions that Echo stands in for."""
