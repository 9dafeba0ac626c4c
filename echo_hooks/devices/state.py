"""What the pretended ``torch.cuda`` answers from: one DeviceState per process, as there is one ``torch.cuda``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from echo_hooks.devices.allocator import CachingAllocator
from echo_hooks.graph.program import DEFAULT_STREAM
from echo_hooks.graph.recorder import Recorder

if TYPE_CHECKING:
    from echo_hooks.hardware.accelerator import Accelerator


@dataclass
class DeviceState:
    """The devices of one node as one rank sees them.

    Attributes:
        local_rank: the device that the rank's allocator and recorder stand for.
        device: index of the current device.
        current_streams: by device, the id of the stream that work goes to (absent: the default stream, id 0).
        stream_numbers: by (device, stream id), the stream's number in the recorder's program.
        pool_position: by (device, pool), how many streams were handed out.
        notes: what the report has to say about the device, whichever rank met it first.
        on_select: told of every change of the current device (the native part follows it).
    """

    recorder: Recorder
    accelerator: Accelerator
    device_count: int
    local_rank: int
    allocator: CachingAllocator
    nccl_version: str
    device: int = 0
    current_streams: dict[int, int] = field(default_factory=dict)
    stream_numbers: dict[tuple[int, int], int] = field(default_factory=dict)
    pool_position: dict[tuple[int, int], int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    on_select: Callable[[int], None] = lambda index: None

    def retarget(self, recorder: Recorder, local_rank: int, allocator: CachingAllocator) -> None:
        """Serve another rank; streams that exist already get a number in its program when they are next used."""
        self.recorder, self.local_rank, self.allocator = recorder, local_rank, allocator
        self.stream_numbers = {}
        self._tell_recorder()
        for sentence in self.notes:  # e.g. of a framework imported before the fork
            recorder.note(sentence)

    def note(self, sentence: str) -> None:
        """Something the report says once, for this rank and for those served later."""
        if sentence not in self.notes:
            self.notes.append(sentence)
        self.recorder.note(sentence)

    def select(self, index: int) -> int:
        """Make device ``index`` the current one; returns the former one."""
        if not 0 <= index < self.device_count:
            raise RuntimeError(f"CUDA error: invalid device ordinal {index}: this node has {self.device_count} devices")
        before, self.device = self.device, index
        if before != index:
            self.on_select(index)
            self._tell_recorder()
        return before

    def set_stream(self, device: int, stream_id: int) -> None:
        """Make a stream its device's current one."""
        self.current_streams[device] = stream_id
        self._tell_recorder()

    def stream_number(self, device: int, stream_id: int) -> int:
        """Number of a stream in the rank's program; all default streams are the program's default stream."""
        if stream_id == 0:
            return DEFAULT_STREAM
        number = self.stream_numbers.get((device, stream_id))
        if number is None:
            number = self.recorder.program.new_stream(f"stream {len(self.stream_numbers) + 1}")
            self.stream_numbers[device, stream_id] = number
        return number

    def _tell_recorder(self) -> None:
        self.recorder.stream = self.stream_number(self.device, self.current_streams.get(self.device, 0))


_ACTIVE: list[DeviceState] = []


def activate(state: DeviceState | None) -> None:
    """Make ``state`` the one that the pretended names answer from; None when the simulation is over."""
    _ACTIVE[:] = [] if state is None else [state]


def is_active() -> bool:
    """Whether a pretended device is installed in this process."""
    return bool(_ACTIVE)


def active() -> DeviceState:
    """The state in force.

    Raises RuntimeError after the simulation: a framework may have kept a function or class from its time.
    """
    if not _ACTIVE:
        raise RuntimeError("this torch.cuda object belongs to a simulation that is over")
    return _ACTIVE[0]
