"""The recorder: the one place to which the virtual world, the pretended device and the op capture write."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.memory import MemoryEvents
from echo_hooks.graph.ops import OpSignature, OpTable
from echo_hooks.graph.program import DEFAULT_STREAM, HOST_STREAM, Kind, Phase, ProgramBuilder

_ECHO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass
class Assumption:
    """A value that had to be made up, aggregated by what and where. ``count``: how often."""

    kind: str
    value: str
    site: str
    count: int = 0


@dataclass
class Recorder:
    """What one rank's host issues, in order, and the state that labels it.

    ``clock_ns`` counts the thread's processor time: what other processes do on a shared machine, and waiting for data
    that a real, slower step would find ready, are not the script's host time.

    The writers set ``stream`` (current device stream) and ``module``/``phase``/``microbatch`` (labels of the next
    records). Host time is what passes outside ``own_time()`` blocks; each record takes what has gathered since the
    one before.
    """

    rank: int
    world_size: int
    clock_ns: Callable[[], int] = time.thread_time_ns
    groups: GroupTable = field(default_factory=GroupTable)
    ops: OpTable = field(default_factory=OpTable)
    program: ProgramBuilder = field(default_factory=ProgramBuilder)
    memory: MemoryEvents = field(default_factory=MemoryEvents)
    assumptions: dict[tuple[str, str, str], Assumption] = field(default_factory=dict)
    unanswered: set[int] = field(default_factory=set)  # ranks that would have known values that had to be made up
    notes: list[str] = field(default_factory=list)
    tallies: dict[str, tuple[int, int]] = field(default_factory=dict)  # name -> built here, configured in all
    one_offs: list[tuple[int, int]] = field(default_factory=list)  # [first, end) of records that no later step repeats
    stream: int = DEFAULT_STREAM
    module: int = 0
    phase: int = Phase.OTHER
    microbatch: int = -1
    overhead_ns: int = 0  # of each entry, spent before our clock can stop: see capture.overhead
    paused: bool = False
    relabel: Callable[[], None] | None = None  # sets module and phase anew before a communication: no op precedes it
    _thread: int = field(default_factory=threading.get_ident)
    _threads: dict[int, int] = field(default_factory=dict)
    _depth: int = 0
    _left_ns: int = 0
    host_ns: int = 0  # gathered since the last record
    _next_event: int = 0
    _next_batch: int = 0
    _batch: int = -1
    _seq: dict[int, int] = field(default_factory=dict)
    _comm_streams: dict[object, int] = field(default_factory=dict)
    _script: str = ""

    def __post_init__(self) -> None:
        self._left_ns = self.clock_ns()

    # ---- time ----

    def ours(self) -> bool:
        """Whether the calling thread is the one whose host time the program tells: the first."""
        return threading.get_ident() == self._thread

    @contextmanager
    def own_time(self):
        """Echo's own time: the host clock of the program stands still inside."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        if not self.ours():
            return
        if self._depth == 0:
            self.host_ns += self.clock_ns() - self._left_ns
        self._depth += 1

    def leave(self) -> None:
        if not self.ours():
            return
        self._depth -= 1
        if self._depth == 0:
            self._left_ns = self.clock_ns()

    def enter_from_dispatch(self) -> None:
        """As ``enter``, for an op that came through the dispatch mode: the way there is Echo's own time too."""
        outermost = self._depth == 0 and self.ours()
        self.enter()
        if outermost:
            self.host_ns = max(0, self.host_ns - self.overhead_ns)

    def _take_host_us(self) -> float:
        host_us = self.host_ns / 1e3
        self.host_ns = 0
        return host_us

    # ---- records ----

    def _append(self, kind: Kind, **values) -> int:
        if self.paused:
            return -1
        if not self.ours():
            return self._append_aside(kind, **values)
        outside = self._depth == 0  # called without own_time(): still never counts our own work
        if outside:
            self.enter()
        try:
            return self.program.append(
                kind,
                host_us=self._take_host_us(),
                module=self.module,
                phase=self.phase,
                microbatch=self.microbatch,
                **values,
            )
        finally:
            if outside:
                self.leave()

    def _append_aside(self, kind: Kind, **values) -> int:
        """A record of another thread of the script (one that prefetches, say): its host time is not measured."""
        thread = self._threads.setdefault(threading.get_ident(), len(self._threads) + 1)
        return self.program.append(kind, module=self.module, phase=Phase.OTHER, thread=thread, **values)

    def compute(self, op: int, bytes: int = 0, stream: int | None = None) -> int:
        return self._append(Kind.COMPUTE, op=op, bytes=bytes, stream=self.stream if stream is None else stream)

    def copy(self, op: int, bytes: int, stream: int | None = None) -> int:
        return self._append(Kind.COPY, op=op, bytes=bytes, stream=self.stream if stream is None else stream)

    def host_work(self, op: int, bytes: int) -> int:
        """Work of the host that did not run here, as its tensors hold no data: ``bytes`` of memory read and written."""
        return self._append(Kind.HOST, op=op, bytes=bytes)

    def record_event(self, stream: int | None = None) -> int:
        """A new event at the end of ``stream``; returns its number."""
        event = self._next_event
        self._next_event += 1
        self._append(Kind.RECORD_EVENT, stream=self.stream if stream is None else stream, event=event)
        return event

    def wait_event(self, event: int, stream: int | None = None) -> None:
        if event >= 0:
            self._append(Kind.WAIT_EVENT, stream=self.stream if stream is None else stream, event=event)

    def sync(self, *, event: int = -1, stream: int = -1) -> None:
        """The host waits for an event, a stream, or (neither given) the device."""
        self._append(Kind.SYNC, event=event, stream=stream, site=self.program.string(self.site()))

    def mark(self, name: str, number: int) -> int:
        return self._append(Kind.MARK, op=self.ops.add(OpSignature(name)), seq=number)

    @contextmanager
    def labelled(self, microbatch: int):
        """What is recorded inside belongs to this micro-batch (counted from 0 within the step)."""
        before, self.microbatch = self.microbatch, microbatch
        try:
            yield
        finally:
            self.microbatch = before

    @contextmanager
    def one_off(self):
        """What is recorded inside is set-up that a framework puts off until a step: no later step repeats it."""
        begin = len(self.program)
        try:
            yield
        finally:
            if len(self.program) > begin:
                self.one_offs.append((begin, len(self.program)))

    # ---- communication ----

    def next_seq(self, group: int) -> int:
        """Running number of the next collective on the group (eager, functional and object calls share it)."""
        seq = self._seq.get(group, 0)
        self._seq[group] = seq + 1
        return seq

    def comm_stream(self, key: object, name: str) -> int:
        """The group's own communication stream, made on first use."""
        stream = self._comm_streams.get(key)
        if stream is None:
            stream = self._comm_streams[key] = self.program.new_stream(name)
        return stream

    def communication(
        self,
        kind: Kind,
        signature: OpSignature,
        *,
        group: int,
        bytes: int,
        dtype: str,
        seq: int = -1,
        peer: int = -1,
        tag: int = -1,
        stream: int | None = None,
        site: str | None = None,
    ) -> int:
        """One collective, send or recv on ``stream`` (HOST_STREAM for gloo); part of the open batch, if one is."""
        if self.relabel is not None and threading.get_ident() == self._thread:
            self.relabel()
        return self._append(
            kind,
            op=self.ops.add(signature),
            group=group,
            seq=seq,
            bytes=bytes,
            dtype=self.program.string(dtype),
            peer=peer,
            tag=tag,
            batch=self._batch,
            stream=self.stream if stream is None else stream,
            site=self.program.string(self.site() if site is None else site),
        )

    @contextmanager
    def batch(self):
        """Communication recorded inside forms one kernel (one grouped NCCL call)."""
        if self._batch >= 0:  # nested grouping is one group, as in NCCL
            yield self._batch
            return
        self._batch, self._next_batch = self._next_batch, self._next_batch + 1
        try:
            yield self._batch
        finally:
            self._batch = -1

    # ---- assumptions ----

    def assume(self, kind: str, value: object, site: str | None = None) -> None:
        """Count a made-up value by kind ("item of unknown float"), value and source line."""
        if self.paused:
            return
        with self.own_time():
            place = self.site() if site is None else site
            key = (kind, str(value), place)
            found = self.assumptions.get(key)
            if found is None:
                found = self.assumptions[key] = Assumption(*key)
            found.count += 1

    def note(self, sentence: str) -> None:
        """Something the report says once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def tally(self, name: str, built: int, configured: int) -> None:
        """Count parts of the model that this rank built, of ``configured`` in the whole model."""
        before, _ = self.tallies.get(name, (0, 0))
        self.tallies[name] = (before + built, configured)

    # ---- source lines ----

    def script(self, path: str) -> None:
        """Name the user's main script, whose frame `site` adds to a framework's."""
        self._script = os.path.join(os.getcwd(), path.removeprefix("./"))  # as Python names it in its code objects

    def site(self) -> str:
        """`file:line` of the innermost frame outside torch and Echo, and of the script's own frame where it differs."""
        frame: FrameType | None = sys._getframe(1)
        inner = outer = ""
        while frame is not None:
            filename = frame.f_code.co_filename
            if not inner and not _foreign(filename):
                inner = f"{_short(filename)}:{frame.f_lineno}"
            if self._script and filename == self._script:
                outer = f"{os.path.basename(filename)}:{frame.f_lineno}"
                break
            frame = frame.f_back
        if not outer or not inner or inner.endswith(outer):
            return inner or outer
        return f"{inner} (from {outer})"


# Their frames stand between a script and what it calls: context managers, decorators (@deprecated), thread starters.
_WRAPPERS = ("contextlib.py", "functools.py", "typing_extensions.py", "warnings.py", "threading.py", "runpy.py")
_FOREIGN: dict[str, bool] = {}
_OURS: set[str] = {_ECHO}


def own_sources(directory: str) -> None:
    """Code below ``directory`` is Echo's: a source line is never one of its."""
    _OURS.add(directory)
    _FOREIGN.clear()


def _foreign(filename: str) -> bool:
    answer = _FOREIGN.get(filename)
    if answer is None:
        torch = sys.modules.get("torch")
        torch_dir = os.path.dirname(getattr(torch, "__file__", "") or "/nonexistent/torch")
        answer = filename.startswith((torch_dir + os.sep, "<", *(own + os.sep for own in _OURS))) or filename.endswith(
            tuple(os.sep + name for name in _WRAPPERS)
        )
        _FOREIGN[filename] = answer
    return answer


def _short(filename: str) -> str:
    """Path below site-packages, else the file's name alone: the same text on every machine."""
    marker = f"site-packages{os.sep}"
    return filename.split(marker, 1)[1] if marker in filename else os.path.basename(filename)


__all__ = ["HOST_STREAM", "Assumption", "Recorder"]
