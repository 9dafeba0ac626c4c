"""What a pretended tensor answers when a script asks for its value."""

from __future__ import annotations

import torch

from echo_hooks import host_tensors
from echo_hooks.capture import shadows
from echo_hooks.capture.costs import dtype_name
from echo_hooks.graph.recorder import Recorder

# A norm must be finite and positive or clipping misfires; a flag of 0 means "do not train"; an overflow flag of 1
# makes a framework skip its step.
_POLICY = ((torch.bool, False), (torch.uint8, 0))


def policy(dtype: torch.dtype):
    """The made-up value for an unknown element of this dtype."""
    for kind, value in _POLICY:
        if dtype is kind:
            return value
    return 1.0 if dtype.is_floating_point or dtype.is_complex else 1


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
