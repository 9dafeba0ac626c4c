"""Versions of the libraries that a GPU build of this torch would have; asked of the wheel where it has them."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

_HOPPER_WORKSPACE, _WORKSPACE = 32 << 20, (2 * 4096 + 8 * 16) << 10  # ":4096:2:16:8" in the variable's own terms


def torch_release() -> tuple[int, int]:
    """(major, minor) of torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def cuda_version() -> str:
    """The CUDA version of this build; on the CPU wheel that of PyTorch's default wheel (RELEASE.md of PyTorch)."""
    return torch.version.cuda or ("13.0" if torch_release() >= (2, 11) else "12.8")


def cudnn_version() -> int:
    """cuDNN's version as a number (9.10.2 is 91002); on the CPU wheel that of PyTorch's default wheel.

    Source: ``Requires-Dist`` of the wheels, 9.10.2 in torch 2.9.1, 9.20.0 in 2.13.0, 9.24.0 in 2.14.1.
    """
    found = torch.backends.cudnn.version()
    if found:
        return found
    release = torch_release()
    return 92400 if release >= (2, 14) else 92000 if release >= (2, 11) else 91002


def cublas_workspace_bytes(compute_capability: tuple[int, int] | None, environ: Mapping[str, str]) -> int:
    """What PyTorch gives cuBLAS to work in, once for each thread and stream that multiplies matrices, out of the
    caching allocator; 0 on devices without cuBLAS.

    Source: aten/src/ATen/cuda/CublasHandlePool.cpp (parseChosenWorkspaceSize): CUBLAS_WORKSPACE_CONFIG as pairs of KiB
    and count, else 32 MiB from Hopper on (what cuBLAS's own documentation recommends) and 8.125 MiB before.
    """
    if compute_capability is None:
        return 0
    pairs = re.findall(r":([0-9]{1,9}):([0-9]{1,9})", environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(int(size) * int(count) for size, count in pairs) << 10
    return _HOPPER_WORKSPACE if compute_capability >= (9, 0) else _WORKSPACE
