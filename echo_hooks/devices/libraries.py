"""Versions of the libraries that a GPU build of this torch would have; asked of the wheel where it has them."""

from __future__ import annotations

import torch


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
