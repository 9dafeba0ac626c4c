"""Streams and events of the pretended device: every wait goes into the rank's program."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from echo_hooks.devices.state import active
from echo_hooks.devices.tables import bindings, choose_by_device, everywhere
from echo_hooks.patching import Patch

# Streams come from pools of 32 per device and priority, handed out in turn (c10/cuda/CUDAStream.cpp,
# kStreamsPerPoolBits and max_compile_time_stream_priorities): the 33rd Stream() is the first again.
_STREAMS_PER_POOL = 32
_PRIORITIES = 4
_CUDA = 1  # c10::DeviceType::CUDA

ELAPSED_MS = 1.0
"""What elapsed_time answers: durations are not known while a script is traced. Each answer counts as an assumption."""


class Stream(torch.Stream):
    """Stands in for torch.cuda.Stream."""

    priority: int

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs):
        if "stream_id" in kwargs:
            stream = _raw(cls, kwargs["stream_id"], kwargs["device_index"])
            stream.priority = _priority_of(kwargs["stream_id"])
            return stream
        return from_pool(cls, _index(device), priority)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """(least, greatest) priority; smaller numbers go first."""
        return (0, 1 - _PRIORITIES)

    @property
    def echo_number(self) -> int:
        """The stream's number in the rank's program."""
        return active().stream_number(self.device_index, self.stream_id)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    @property
    def _as_parameter_(self):
        return ctypes.c_void_p(self.stream_id)

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.stream_id)

    def wait_event(self, event) -> None:
        event.wait(self)

    def wait_stream(self, stream) -> None:
        recorder = active().recorder
        recorder.wait_event(recorder.record_event(number_of(stream)), self.echo_number)

    def record_event(self, event=None):
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        active().recorder.sync(stream=self.echo_number)

    def query(self) -> bool:
        active().recorder.assume("query of a stream", True)
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self):
        context = torch.cuda.StreamContext(self)  # type: ignore[arg-type]
        self._contexts = [*getattr(self, "_contexts", []), context]
        context.__enter__()
        return self

    def __exit__(self, *error):
        self._contexts.pop().__exit__(*error)

    def __eq__(self, other) -> bool:
        return isinstance(other, torch.Stream) and (self.device, self.stream_id) == (other.device, other.stream_id)

    def __hash__(self) -> int:
        return hash((self.device_index, self.stream_id))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"


class ExternalStream(Stream):
    """Stands in for torch.cuda.ExternalStream: a stream of another library, known by its address."""

    def __new__(cls, stream_ptr: int, device: Any = None, **kwargs):
        stream = _raw(cls, stream_ptr, _index(device))
        stream.priority = 0
        return stream


class Event(torch.Event):
    """Stands in for torch.cuda.Event.

    ``number`` is the recorder's number of the last ``record()``, -1 before the first (waiting is then no wait, as in
    CUDA).
    """

    number: int
    timed: bool

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **kwargs):
        device = torch.device("cuda", _index(kwargs.get("device")))
        event = torch.Event.__new__(cls, device, enable_timing=enable_timing)
        event.number, event.timed = -1, enable_timing
        return event

    def __init__(self, *args, **kwargs):  # object.__init__ would refuse the arguments of __new__
        pass

    def record(self, stream=None) -> None:
        self.number = active().recorder.record_event(None if stream is None else number_of(stream))

    def wait(self, stream=None) -> None:
        active().recorder.wait_event(self.number, None if stream is None else number_of(stream))

    def synchronize(self) -> None:
        if self.number >= 0:
            active().recorder.sync(event=self.number)

    def query(self) -> bool:
        if self.number >= 0:
            active().recorder.assume("query of an event", True)
        return True

    def elapsed_time(self, end_event) -> float:
        if not (self.timed and end_event.timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.number < 0 or end_event.number < 0:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        active().recorder.assume("elapsed_time between events", f"{ELAPSED_MS} ms")
        return ELAPSED_MS

    @classmethod
    def from_ipc_handle(cls, device, handle):
        raise NotImplementedError("events shared between processes are not simulated")

    def ipc_handle(self):
        raise NotImplementedError("events shared between processes are not simulated")

    def __repr__(self) -> str:
        return "<torch.cuda.Event uninitialized>" if self.number < 0 else f"<torch.cuda.Event {self.number:#x}>"


def from_pool(cls, device: int, priority: int):
    """The next stream of the device's pool for ``priority`` (clamped to the range that exists)."""
    pool = min(max(-priority, 0), _PRIORITIES - 1)
    position = active().pool_position.get((device, pool), 0)
    active().pool_position[device, pool] = position + 1
    stream = _raw(cls, 1 + pool * _STREAMS_PER_POOL + position % _STREAMS_PER_POOL, device)
    stream.priority = -pool
    return stream


def number_of(stream) -> int:
    """Number, in the rank's program, of any stream object of the device (also a plain torch.Stream)."""
    return active().stream_number(stream.device_index, stream.stream_id)


def stream_patches() -> list[Patch]:
    """Stream and Event, under every name that torch has for them, and the functions that select streams."""
    why = "waits between streams are part of the rank's program"
    owners = (torch.cuda, torch.cuda.streams)
    patches = everywhere(owners, {"Stream": Stream, "ExternalStream": ExternalStream, "Event": Event}, why)
    patches += [
        Patch(torch, "Stream", lambda original: choose_by_device(original, _generic_stream), why),
        Patch(torch, "Event", lambda original: choose_by_device(original, _generic_event), why),
    ]
    below = {
        "_cuda_getCurrentStream": lambda device: _triple(active().current_streams.get(device, 0), device),
        "_cuda_getDefaultStream": lambda device: _triple(0, device),
        "_cuda_getStreamFromExternal": _triple,
        "_cuda_getCurrentRawStream": lambda device: active().current_streams.get(device, 0),
        "_cuda_setStream": _set_stream,
    }
    return patches + bindings(below, why)


def _generic_stream(device=None, *, priority: int = 0, **kwargs):
    return Stream(device, priority=priority, **kwargs)


def _generic_event(device=None, *, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False):
    return Event(enable_timing, blocking, interprocess, device=device)


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    active().select(device_index)
    active().set_stream(device_index, stream_id)


def _triple(stream_id: int, device_index: int) -> tuple[int, int, int]:
    return (stream_id, device_index, _CUDA)


def _raw(cls, stream_id: int, device_index: int):
    return torch.Stream.__new__(cls, stream_id=stream_id, device_index=device_index, device_type=_CUDA)


def _priority_of(stream_id: int) -> int:
    return -(max(stream_id - 1, 0) // _STREAMS_PER_POOL) if stream_id <= _STREAMS_PER_POOL * _PRIORITIES else 0


def _index(device: Any) -> int:
    """Device index; the current device for None and for a device without index."""
    if isinstance(device, int):
        return device if device >= 0 else active().device
    index = None if device is None else torch.device(device).index
    return active().device if index is None else index
