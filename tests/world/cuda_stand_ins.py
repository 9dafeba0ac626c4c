"""The few names of torch.cuda that megatron-core insists on, mapped to the CPU: for both sides of the oracle alike."""

from __future__ import annotations

import contextlib

import torch
from torch.overrides import TorchFunctionMode


class CpuForCuda(TorchFunctionMode):
    """``device="cuda"`` means the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class _Stream:
    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, other):
        pass

    def synchronize(self):
        pass

    def record_event(self, event=None):
        pass

    def wait_event(self, event):
        pass


def install() -> None:
    cuda = torch.cuda
    cpu = torch.device("cpu")
    cuda.current_device = lambda: cpu
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *a, **k: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    cuda.random.get_rng_state, cuda.random.set_rng_state = cuda.get_rng_state, cuda.set_rng_state
    cuda._lazy_init, cuda._lazy_call = lambda: None, lambda call, **k: call()
    cuda.device = lambda *a, **k: contextlib.nullcontext()
    torch._C._cuda_setRNGState = torch.set_rng_state
    cuda.synchronize = lambda *a, **k: None
    cuda.Stream = _Stream
    cuda.Event = _Stream
    cuda.current_stream = lambda *a, **k: _Stream()
    cuda.stream = lambda *a, **k: contextlib.nullcontext()
    cuda.memory_allocated = lambda *a, **k: 0
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *a, **k: None
    for name, dtype in (("FloatTensor", torch.float32), ("HalfTensor", torch.float16),
                        ("BFloat16Tensor", torch.bfloat16)):  # fmt: skip
        setattr(cuda, name, _typed(name, dtype))
    named = torch.Tensor.type
    torch.Tensor.type = lambda self, dtype=None, **k: (
        "torch.cuda." + named(self).rsplit(".", 1)[1] if dtype is None else named(self, dtype, **k)
    )
    torch.Tensor.cuda = lambda self, *a, **k: self
    CpuForCuda().__enter__()  # for the rest of the process


def _typed(name: str, dtype: torch.dtype) -> type:
    class Meta(type):
        def __instancecheck__(cls, obj):
            return isinstance(obj, torch.Tensor) and obj.dtype == dtype

        def __call__(cls, *args):
            return torch.tensor(*args, dtype=dtype)

    return Meta(name, (), {})
