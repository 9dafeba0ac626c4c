"""Recurrent layers without cuDNN: its kernels set up their state on the device before any op could be seen."""

from __future__ import annotations

import torch

from echo_hooks.devices.state import active

_NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class RecurrentKernels:
    """Registers the recurrent ops with torch's dispatcher as a loop over their cells; ``remove`` takes them out again.

    A real GPU runs one cuDNN kernel per layer instead, so the record has more and shorter ops than the truth; a note
    says so.
    """

    def __init__(self) -> None:
        self._library: torch.library.Library | None = None

    def install(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        for name in _NAMES:
            for overload in ("input", "data"):  # of padded and of packed sequences
                op = getattr(getattr(torch.ops.aten, name), overload)
                self._library.impl(f"{name}.{overload}", _cells(op), "AutogradCUDA")

    def remove(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None


def _cells(op):
    def run(*args):
        active().note("recurrent layers are recorded cell by cell: cuDNN would run whole layers, faster")
        enabled = torch._C._get_cudnn_enabled()
        torch._C._set_cudnn_enabled(False)
        try:
            return op.decompose(*args)
        finally:
            torch._C._set_cudnn_enabled(enabled)

    return run
