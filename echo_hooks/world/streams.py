"""Where a communication runs and what has to wait for it: the stream rules of NCCL and gloo, written out.

NCCL since torch 2.8: a collective with ``async_op=False`` runs on the caller's current stream, an asynchronous one on
the group's own stream, between two events (pytorch pull request 148590). Un-batched p2p has a communicator and a
stream of its own per pair of ranks; batched p2p uses the group's (ProcessGroupNCCL.cpp, pointToPoint). gloo, and
everything on CPU tensors, runs on the host.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from echo_hooks.graph.program import HOST_STREAM
from echo_hooks.graph.recorder import Recorder

if TYPE_CHECKING:
    from echo_hooks.world.group import RecordingGroup


@dataclass
class Completion:
    """How to wait for one issued communication.

    ``event``: completes with it (-1: stream order is enough). ``host``: it runs on the host, so waiting blocks the
    host. ``blocks_host``: a barrier on a device, whose wait blocks the host too; ``stream``: where it runs.
    """

    event: int = -1
    host: bool = False
    blocks_host: bool = False
    stream: int = HOST_STREAM
    _waited: set[int] = field(default_factory=set)

    def wait(self, recorder: Recorder) -> None:
        """What ``Work.wait()`` does; repeated on one stream it changes nothing."""
        if self.host:
            if self.event >= 0 and HOST_STREAM not in self._waited:
                self._waited.add(HOST_STREAM)
                recorder.sync(event=self.event)
            return
        stream = recorder.stream
        if stream in self._waited:
            return
        self._waited.add(stream)
        if self.event >= 0:
            recorder.wait_event(self.event, stream)
        if self.blocks_host:
            recorder.sync(stream=stream)

    def poll(self, recorder: Recorder) -> None:
        """``is_completed()`` answers True, so the host must have waited (once: polling on changes nothing)."""
        if self.host:
            self.wait(recorder)
        elif HOST_STREAM not in self._waited:
            self._waited.add(HOST_STREAM)
            recorder.sync(event=self.event, stream=self.stream)


@dataclass
class Place:
    """The stream of one communication, entered by ``begin`` and left by ``end``."""

    recorder: Recorder
    stream: int
    host: bool
    asynchronous: bool
    bracket: Bracket | None = None

    @classmethod
    def collective(cls, recorder: Recorder, group: RecordingGroup, device: torch.device, asynchronous: bool) -> Place:
        entry = group.entry
        if group.runs_on_host(device):
            stream = HOST_STREAM
            if asynchronous:
                stream = recorder.comm_stream(("host", entry.index), f"host:{entry.name}")
            return cls(recorder, stream, True, asynchronous)
        stream = recorder.stream
        if asynchronous:
            stream = recorder.comm_stream(entry.index, f"comm:{entry.name}")
        return cls(recorder, stream, False, asynchronous, group.bracket)

    @classmethod
    def point_to_point(
        cls, recorder: Recorder, group: RecordingGroup, device: torch.device, source: int, destination: int
    ) -> Place:
        """``source``, ``destination``: global ranks."""
        entry = group.entry
        if group.runs_on_host(device):
            # gloo matches each direction of a pair by itself: a posted receive never holds up a send.
            name = f"host:{entry.name} {source}>{destination}"
            return cls(recorder, recorder.comm_stream(("host", entry.index, source, destination), name), True, True)
        if group.bracket is not None:
            return cls.collective(recorder, group, device, True)
        pair = min(source, destination), max(source, destination)
        name = f"p2p:{entry.name} {pair[0]}-{pair[1]}"
        return cls(recorder, recorder.comm_stream((entry.index, *pair), name), False, True)

    def begin(self) -> None:
        """An asynchronous device call starts after what the caller's stream holds."""
        if self.asynchronous and not self.host and (self.bracket is None or self.bracket.enter(self.stream)):
            self.recorder.wait_event(self.recorder.record_event(), self.stream)

    def end(self, blocks_host: bool = False) -> Completion:
        """What waiting for it means; inside a bracket only the bracket's own end can be waited for."""
        event = -1
        if self.bracket is not None:
            return Completion(host=self.host, stream=self.stream)
        if self.asynchronous:
            event = self.recorder.record_event(self.stream)
        return Completion(event, self.host, blocks_host, self.stream)


class Bracket:
    """Calls between start and end of coalescing: one batch, one pair of events around it."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.stream: int | None = None
        self._stack = ExitStack()
        self._stack.enter_context(recorder.batch())

    def enter(self, stream: int) -> bool:
        """True for the first asynchronous call, which has to wait for the caller's stream."""
        first, self.stream = self.stream is None, stream
        return first

    def close(self) -> Completion:
        self._stack.close()
        if self.stream is None:
            return Completion()
        return Completion(self.recorder.record_event(self.stream), stream=self.stream)
