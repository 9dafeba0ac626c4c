"""The few names of torch.cuda that megatron-core insists on, mapped to the CPU: for both sides of the oracle alike."""

from __future__ import annotations

import contextlib

import torch


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
    torch.Tensor.cuda = lambda self, *a, **k: self


def _typed(name: str, dtype: torch.dtype) -> type:
    class Meta(type):
        def __instancecheck__(cls, obj):
            return isinstance(obj, torch.Tensor) and obj.dtype == dtype

        def __call__(cls, *args):
            return torch.tensor(*args, dtype=dtype)

    return Meta(name, (), {})
