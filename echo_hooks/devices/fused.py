"""Ops that are one kernel on a GPU, and for which a build without CUDA has only their decomposition.

A GPU runs RMSNorm and the backward of SiLU and Mish as one kernel each. PyTorch decides between an op and its
decomposition by whether the device has a kernel registered: on the CPU wheel CUDA has none, so that autograd would take
eight kernels for one. The list: every op that has both a CUDA kernel and a CompositeImplicitAutograd decomposition in
the CUDA wheel of torch 2.14 (torch._C._dispatch_dump of all ops).
"""

from __future__ import annotations

from typing import Any

import torch

NAMES = ("_fused_rms_norm", "mish_backward", "silu_backward")


class FusedKernels:
    """Registers a CUDA kernel for each of NAMES that has none; ``remove`` takes them out again.

    The kernel itself is never reached: pretended tensors are served before any kernel.
    """

    def __init__(self) -> None:
        self._library: torch.library.Library | None = None

    def install(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        for name in NAMES:
            op = getattr(torch.ops.aten, name, None)
            if op is not None and not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
                self._library.impl(name, _unreachable, "CUDA")

    def remove(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None


def _unreachable(*_args: Any, **_kwargs: Any) -> Any:
    raise RuntimeError("a kernel of the pretended device was asked to run on a tensor that is not pretended")
