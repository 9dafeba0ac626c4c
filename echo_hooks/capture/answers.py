"""What a pretended tensor answers when a script asks for its value."""

from __future__ import annotations

import torch

from echo_hooks import host_tensors
from echo_hooks.capture import shadows
from echo_hooks.graph.ops import dtype_name
from echo_hooks.graph.recorder import Recorder
from echo_hooks.world.values import policy_value


def policy(dtype: torch.dtype) -> bool | int | float:
    """The made-up value for an unknown element of this dtype.

    Floating: 1.0, as a norm must be finite and positive or clipping misfires. Others as the virtual world has them.
    """
    if dtype.is_floating_point or dtype.is_complex:
        return 1.0
    value = policy_value(dtype)
    return bool(value) if dtype is torch.bool else value


def item(recorder: Recorder, tensor: torch.Tensor):
    """Value of a one-element tensor: the true one, else the policy's, counted with the source line."""
    value = shadows.known(tensor)
    if value is not None:
        return value.item()
    answer = policy(tensor.dtype)
    recorder.assume(f"value of an unknown {dtype_name(tensor.dtype)} tensor", answer)
    return answer


def on_cpu(recorder: Recorder, tensor: torch.Tensor) -> torch.Tensor:
    """A real CPU tensor with the value of ``tensor``: true, else filled with the policy's, counted."""
    value = shadows.known(tensor)
    if value is not None:
        return value.clone()
    recorder.assume(
        f"contents of an unknown {dtype_name(tensor.dtype)} tensor copied to the host", policy(tensor.dtype)
    )
    return host_tensors.full(tensor.shape, policy(tensor.dtype), tensor.dtype)
