"""The recorder of a rank whose ops really run: beside its records it keeps when Echo's own code ran on the host."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from echo_hooks.graph.program import DEFAULT_STREAM
from echo_hooks.graph.recorder import Recorder

# Tags of spans: what begins or ends there.
SYNC = "sync"
BACKWARD, BACKWARD_END = "backward", "backward_end"
OPTIMIZER, OPTIMIZER_END = "optimizer", "optimizer_end"
ON_STREAM = "on_stream"


@dataclass(slots=True)
class Span:
    """Echo's own code ran on thread ``thread`` (of the operating system) from ``begin_ns`` to ``end_ns`` (of
    time.time_ns) and recorded rows [``first``, ``last``) of the program.

    ``tag``: what begins or ends here ("" for communication). ``number``: with SYNC the event waited for (-1: not
    known), with ON_STREAM the stream on which what is launched next is to be placed (-1: the real one again).
    """

    begin_ns: int
    end_ns: int
    thread: int
    first: int
    last: int
    tag: str = ""
    number: int = -1


class LiveRecorder(Recorder):
    """``current_stream``: gives the number of the calling thread's current stream.

    The threads of the autograd engine count as the first one: it waits while they work.
    """

    def __init__(self, rank: int, world_size: int):
        self._override: int | None = None
        self.current_stream: Callable[[], int] = lambda: DEFAULT_STREAM
        self.spans: list[Span] = []
        self._opened = 0
        self._first = 0
        self._tag, self._tag_number = "", -1
        super().__init__(rank, world_size, clock_ns=time.time_ns)

    @property
    def stream(self) -> int:  # type: ignore[override]
        return self.current_stream() if self._override is None else self._override

    @stream.setter
    def stream(self, number: int) -> None:
        """Place what follows on another stream than the current one (callbacks of a communication), until that is
        set again."""
        override = None if number == self.current_stream() else number
        if override != self._override:
            self._override = override
            self.moment(ON_STREAM, -1 if override is None else override)

    def communication(self, *args, **kwargs) -> int:
        """As Recorder's; while nothing is kept, the call's place in the source is not looked for either."""
        return -1 if self.paused else super().communication(*args, **kwargs)

    def ours(self) -> bool:
        own = threading.get_ident()
        if own == self._thread:
            return True
        known = threading._active.get(own)  # type: ignore[attr-defined]
        return known is None or isinstance(known, threading._DummyThread)  # type: ignore[attr-defined]

    def enter(self) -> None:
        if not self.ours():
            return
        if self._depth == 0:
            self._opened = time.time_ns()
            self._first = len(self.program)
        self._depth += 1

    def leave(self) -> None:
        if not self.ours():
            return
        self._depth -= 1
        if self._depth == 0:
            thread = threading.get_native_id()
            last = len(self.program)
            self.spans.append(
                Span(self._opened, time.time_ns(), thread, self._first, last, self._tag, self._tag_number)
            )
            self._tag, self._tag_number = "", -1

    def overhead_us(self, rounds: int = 200) -> float:
        """What passes between two spans that follow each other at once: Echo's own, beyond its clock. The spans made
        for it are forgotten."""
        kept = len(self.spans)
        for _ in range(rounds):
            self.moment("")
        made, self.spans[kept:] = self.spans[kept:], []
        gaps = sorted(later.begin_ns - span.end_ns for span, later in itertools.pairwise(made))
        return gaps[len(gaps) // 2] / 1e3

    def moment(self, tag: str, number: int = -1) -> None:
        """An empty span: a moment of the host that every pass through the step goes through."""
        self.enter()
        if self._depth == 1:
            self._tag, self._tag_number = tag, number
        self.leave()
