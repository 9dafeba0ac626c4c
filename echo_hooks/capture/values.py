"""How the virtual world reads and writes tensors: real ones directly, pretended ones through their shadows."""

from __future__ import annotations

import torch

from echo_hooks import host_tensors
from echo_hooks.capture import shadows
from echo_hooks.capture.mode import CaptureMode
from echo_hooks.devices.pretended import Pretended


class CaptureValues:
    """The `Values` of a simulation (see echo_hooks.world.values)."""

    in_place = False

    def __init__(self, mode: CaptureMode):
        self.mode = mode

    def pretended(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, Pretended)

    def known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return shadows.known(tensor)

    def set(self, tensor: torch.Tensor, value: torch.Tensor | None) -> None:
        if isinstance(tensor, Pretended):
            if value is not None:
                value = value.detach().to(tensor.dtype, copy=True).reshape(tensor.shape)
            shadows.remember(tensor, value)
        elif value is not None:
            with torch.no_grad():
                tensor.copy_(value.reshape(tensor.shape))

    def empty(self, like: torch.Tensor, shape, dtype: torch.dtype | None = None) -> torch.Tensor:
        if isinstance(like, Pretended):
            return self.mode.fresh(like, shape, dtype)
        return host_tensors.empty(shape, dtype or like.dtype)
