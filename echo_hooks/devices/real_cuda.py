"""The real CUDA device: torch.cuda as it is, with the waits that Python asks for written into the rank's program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from echo_hooks.graph.live import SYNC, LiveRecorder
from echo_hooks.patching import Patch, PatchSet


class RealCuda:
    """Device 0 of this process, the only one it sees: every rank is local rank 0 of its own.

    ``on_first_use`` is called before the process touches the GPU, ``after_first_use`` right behind.
    """

    current_device = 0

    def __init__(self, recorder: LiveRecorder):
        self.recorder = recorder
        self.on_first_use: Callable[[], None] = lambda: None
        self.after_first_use: Callable[[], None] = lambda: None
        self.handles: dict[int, int] = {0: 0}  # address of a stream -> its number in the program
        self.streams: dict[int, Any] = {}  # number -> a torch stream object
        self._patches = PatchSet(self._table())

    def install(self) -> None:
        self._patches.install()

    def remove(self) -> None:
        self._patches.remove()

    def retarget(self, recorder: LiveRecorder, local_rank: int = 0, allocator: Any = None) -> None:
        """Write to another recorder from now on."""
        self.recorder = recorder
        recorder.current_stream = self.current_stream
        self.handles = {0: 0}
        self.streams = {}

    def current_stream(self) -> int:
        """Number of the calling thread's current stream in the program."""
        if not torch.cuda.is_initialized():
            return 0
        raw = torch._C._cuda_getCurrentRawStream(0)  # type: ignore[attr-defined]
        number = self.handles.get(raw)
        return self._new(raw, torch.cuda.current_stream()) if number is None else number

    def number_of(self, stream: Any) -> int:
        """Number of a stream object."""
        raw = getattr(stream, "cuda_stream", None)
        if raw is None:  # a plain torch.Stream
            stream = torch.cuda.Stream(
                stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
            )
            raw = stream.cuda_stream
        number = self.handles.get(raw)
        return self._new(raw, stream) if number is None else number

    def _new(self, raw: int, stream: Any) -> int:
        number = self.handles[raw] = self.recorder.program.new_stream(f"stream {len(self.handles)}")
        self.streams[number] = stream
        return number

    # ---- patches ----

    def _table(self) -> list[Patch]:
        why = "waits between streams are part of the rank's program"
        event, stream, binding = torch.cuda.Event, torch.cuda.Stream, torch._C
        table = [
            Patch(event, "record", self._record, why),
            Patch(event, "wait", self._wait, why),
            Patch(event, "synchronize", self._synchronize_event, "the host waits here"),
            Patch(stream, "synchronize", self._synchronized, "the host waits here"),
            Patch(binding, "_cuda_synchronize", self._synchronized, "the host waits here", create=True),
            Patch(binding, "_accelerator_synchronizeDevice", self._synchronized, "the host waits here", create=True),
            Patch(torch.cuda, "_lazy_init", self._lazy_init, "one rank at a time on the GPU"),
        ]
        return [patch for patch in table if not patch.create or hasattr(patch.owner, patch.name)]

    def _record(self, original):
        def record(event, stream=None):
            original(event) if stream is None else original(event, stream)
            recorder = self.recorder
            recorder.enter()
            try:
                event.echo_number = recorder.record_event(None if stream is None else self.number_of(stream))
            finally:
                recorder.leave()

        return record

    def _wait(self, original):
        def wait(event, stream=None):
            original(event) if stream is None else original(event, stream)
            recorder = self.recorder
            recorder.enter()
            try:
                number = getattr(event, "echo_number", -1)
                recorder.wait_event(number, None if stream is None else self.number_of(stream))
            finally:
                recorder.leave()

        return wait

    def _synchronize_event(self, original):
        def synchronize(event):
            self.recorder.moment(SYNC, getattr(event, "echo_number", -1))
            try:
                return original(event)
            finally:
                self.recorder.moment("")

        return synchronize

    def _synchronized(self, original):
        def synchronize(*args, **kwargs):
            self.recorder.moment(SYNC)
            try:
                return original(*args, **kwargs)
            finally:
                self.recorder.moment("")

        return synchronize

    def _lazy_init(self, original):
        def lazy_init():
            if torch.cuda.is_initialized():
                return
            recorder = self.recorder
            recorder.enter()
            try:
                self.on_first_use()
                original()
                self.after_first_use()
            finally:
                recorder.leave()

        return lazy_init


def stream_objects(device: RealCuda) -> list[tuple[int, Any]]:
    """(number in the program, torch stream) of all streams seen."""
    return [(0, torch.cuda.default_stream()), *sorted(device.streams.items())]
