"""``torch.accelerator``: the device-neutral names; torch's own Python above functions of ``torch._C``."""

from __future__ import annotations

import torch

from echo_hooks.devices.memory import allocator_of, memory_info, nested
from echo_hooks.devices.state import active
from echo_hooks.devices.streams import Stream
from echo_hooks.devices.tables import bindings
from echo_hooks.patching import Patch


def accelerator_patches() -> list[Patch]:
    """The functions of ``torch._C`` below ``torch.accelerator``."""
    return bindings(
        {
            "_accelerator_getAccelerator": lambda: torch.device("cuda"),
            "_accelerator_getDeviceIndex": lambda: active().device,
            "_accelerator_setDeviceIndex": _select,
            "_accelerator_exchangeDevice": _select,
            "_accelerator_maybeExchangeDevice": _select,
            "_accelerator_getStream": _current_stream,
            "_accelerator_setStream": _set_stream,
            "_accelerator_synchronizeDevice": lambda index: active().recorder.sync(),
            "_accelerator_isAllocatorInitialized": lambda: True,
            "_accelerator_emptyCache": lambda: active().allocator.empty_cache(),
            "_accelerator_emptyHostCache": lambda: None,
            "_accelerator_getDeviceStats": lambda index: nested(allocator_of(index).stats()),
            "_accelerator_resetPeakStats": lambda index: allocator_of(index).reset_peak(),
            "_accelerator_resetAccumulatedStats": lambda index: allocator_of(index).reset_accumulated(),
            "_accelerator_getMemoryInfo": memory_info,
        },
        "the device-neutral way to the same device",
    )


def _select(index: int) -> int:
    return active().select(index) if index >= 0 else -1


def _current_stream(index: int) -> Stream:
    return Stream(stream_id=active().current_streams.get(index, 0), device_index=index)


def _set_stream(stream) -> None:
    active().select(stream.device_index)
    active().set_stream(stream.device_index, stream.stream_id)
