"""Rank programs: what one rank's host issued, in order, as columns."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np


class Kind(IntEnum):
    """What a record is. Device records run on a stream; the others happen on the host."""

    COMPUTE = 0  # a kernel of the rank's own
    COPY = 1  # host-to-device, device-to-host or device-to-device copy by a copy engine
    COLLECTIVE = 2
    SEND = 3
    RECV = 4
    RECORD_EVENT = 5  # `event` completes when all earlier work of `stream` has
    WAIT_EVENT = 6  # later work of `stream` starts no earlier than `event` completes
    SYNC = 7  # the host waits: for `event` if >= 0, else for `stream` if >= 0, else for the whole device
    HOST = 8  # host time, and where it has an op, work of the host's on tensors that hold no data: `duration_us`
    MARK = 9  # a boundary; its op is "step_begin" or "step_end" and `seq` the step's number


class Phase(IntEnum):
    """Which part of the step a record belongs to."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2
    OTHER = 3


class Evidence(IntEnum):
    """Where a duration comes from (see `evidence` in the report)."""

    NONE = 0
    MEASURED = 1
    PROFILED = 2
    MODELLED = 3
    ASSUMED = 4


HOST_STREAM = -1
"""`stream` of a communication that runs on the host (gloo): the host blocks until it is over."""

DEFAULT_STREAM = 0

COLUMNS: dict[str, type] = {
    "kind": np.uint8,
    "host_us": np.float64,  # host time since the record before on this thread, without Echo's own
    "stream": np.int32,  # index into Program.streams; HOST_STREAM: on the host
    "event": np.int64,  # running number; recording an event again gives a new number; -1: none
    "thread": np.int16,
    "duration_us": np.float64,  # alone on the device; NaN until timing fills it
    "evidence": np.uint8,
    "op": np.int32,  # index into the op signatures; -1: none
    "group": np.int32,  # Group.index; -1: none
    "seq": np.int32,  # running number of the collective on its group (-1 for send and recv)
    "bytes": np.int64,  # payload, convention of nccl-tests: the larger of one rank's send and receive buffers
    "dtype": np.int16,  # index into Program.strings
    "peer": np.int32,  # global rank: the other end of a send or recv, the root of a rooted collective; -1: none
    "tag": np.int32,
    "batch": np.int32,  # calls with the same number form one kernel (batch_isend_irecv, coalescing); -1: none
    "module": np.int32,  # index into Program.strings
    "phase": np.uint8,
    "microbatch": np.int16,  # -1: unknown
    "site": np.int32,  # index into Program.strings: "file:line" of the user's code; communication and SYNC only
}

DEFAULTS: dict[str, float] = {
    "host_us": 0.0,
    "stream": DEFAULT_STREAM,
    "event": -1,
    "thread": 0,
    "duration_us": float("nan"),
    "evidence": Evidence.NONE,
    "op": -1,
    "group": -1,
    "seq": -1,
    "bytes": 0,
    "dtype": 0,
    "peer": -1,
    "tag": -1,
    "batch": -1,
    "module": 0,
    "phase": Phase.OTHER,
    "microbatch": -1,
    "site": 0,
}


@dataclass
class Program:
    """One rank's program: equally long numpy columns (see COLUMNS) and the tables they index.

    ``strings[0]`` is always "". ``streams[0]`` is the default stream.
    """

    columns: dict[str, np.ndarray]
    strings: list[str] = field(default_factory=lambda: [""])
    streams: list[str] = field(default_factory=lambda: ["default"])

    def __len__(self) -> int:
        return len(self.columns["kind"])

    def __getattr__(self, name: str) -> np.ndarray:
        columns = self.__dict__.get("columns")
        if columns is not None and name in columns:
            return columns[name]
        raise AttributeError(name)

    def slice(self, start: int, stop: int) -> Program:
        """Records [start, stop) as a program of their own (tables shared)."""
        return Program({k: v[start:stop] for k, v in self.columns.items()}, self.strings, self.streams)

    def joined(self, later: Program) -> Program:
        """This program followed by another on the same tables."""
        columns = {k: np.concatenate([v, later.columns[k]]) for k, v in self.columns.items()}
        return Program(columns, self.strings, self.streams)


class ProgramBuilder:
    """Appends records; ``program()`` turns them into columns."""

    def __init__(self) -> None:
        self._rows: list[tuple] = []
        self._names = tuple(COLUMNS)
        self._defaults = tuple(DEFAULTS.get(name) for name in self._names)
        self.strings: list[str] = [""]
        self._string_index: dict[str, int] = {"": 0}
        self.streams: list[str] = ["default"]

    def __len__(self) -> int:
        return len(self._rows)

    def string(self, text: str) -> int:
        """Index of ``text`` in the string table, added when new."""
        index = self._string_index.get(text)
        if index is None:
            index = self._string_index[text] = len(self.strings)
            self.strings.append(text)
        return index

    def new_stream(self, name: str) -> int:
        self.streams.append(name)
        return len(self.streams) - 1

    def append(self, kind: Kind, **values) -> int:
        """Add one record; columns not given take their DEFAULTS. Returns the record's index."""
        get = values.get
        row = [get(name, default) for name, default in zip(self._names, self._defaults)]
        row[0] = kind
        self._rows.append(tuple(row))
        return len(self._rows) - 1

    def program(self) -> Program:
        transposed = list(zip(*self._rows)) if self._rows else [() for _ in self._names]
        columns: dict[str, np.ndarray] = {
            name: np.asarray(values, dtype=COLUMNS[name]) for name, values in zip(self._names, transposed, strict=True)
        }
        return Program(columns, list(self.strings), list(self.streams))
