"""What the composer answers: the timeline of every class of ranks, and where its time went."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from echo_hooks.graph.problems import Problem
from echo_hooks.graph.program import Program


@dataclass
class Breakdown:
    """One step of one rank, every microsecond counted once, in this order of precedence.

    ``compute_us``: a kernel or copy of the rank's own runs. ``exposed_communication_us`` (by group name): none runs,
    and communication moves data. ``bubble_us``: none of these, and a send or recv waits for its partner.
    ``waiting_us``: none of these, and a collective waits for its last member. ``host_us``: the device has nothing to
    do. The parts sum to ``step_us``. ``communication_us`` (by group name) is all communication, hidden or not.
    """

    step_us: float
    compute_us: float
    exposed_communication_us: dict[str, float]
    bubble_us: float
    waiting_us: float
    host_us: float
    communication_us: dict[str, float] = field(default_factory=dict)


@dataclass
class Timeline:
    """The measured step of a class of ranks that do the same at the same time.

    Arrays run over the records of ``program``, in microseconds from the start of the step on the representative's
    host clock: ``issue_us`` when the host issued the record, ``start_us``/``end_us`` when it ran (NaN for records
    that never run on a stream). For communication (the records ``calls``) ``calls_ready_us`` is when the last
    member had arrived (data moves from then on); ``ready_us`` has the same by record.
    ``slowdown``: duration over duration alone, 1.0 where nothing overlapped. ``slack_us``: how much later the
    record could end (one without an end: be issued) before the step's last rank ends later; 0 on the critical path,
    None where it was not worked out. Adding ``offset_us`` puts the timelines of one composition on a common clock.
    """

    representative: int
    ranks: tuple[int, ...]
    role: str
    program: Program
    issue_us: np.ndarray
    start_us: np.ndarray
    end_us: np.ndarray
    slowdown: np.ndarray
    breakdown: Breakdown
    calls: np.ndarray
    calls_ready_us: np.ndarray
    offset_us: float = 0.0
    slack_us: np.ndarray | None = None

    @property
    def ready_us(self) -> np.ndarray:
        """Made anew each time: few records are communication, and an unfolded world has many timelines."""
        return expanded(self.calls_ready_us, self.calls, len(self.program))


def expanded(values: np.ndarray, records: np.ndarray, n: int) -> np.ndarray:
    """``values`` at ``records`` among ``n``, NaN elsewhere."""
    full = np.full(n, np.nan)
    full[records] = values
    return full


@dataclass
class CriticalPath:
    """What the end of the step waited for, segment after segment from its begin.

    Equally long arrays: ``timeline`` (index into the composition's) and ``record`` of each segment, ``host`` (host time
    before the record was issued, rather than the record's own time on the device or the wire), ``begin_us`` and
    ``end_us`` on the common clock of the timelines.
    """

    timeline: np.ndarray
    record: np.ndarray
    host: np.ndarray
    begin_us: np.ndarray
    end_us: np.ndarray


@dataclass(frozen=True)
class Band:
    """Quantiles of the step time, in microseconds, and in one sentence what they rest on."""

    p10_us: float
    p50_us: float
    p90_us: float
    basis: str = ""


@dataclass
class Composition:
    """``step_time_us``: period of the steady state, over all ranks. ``critical``: index of the timeline with the
    longest busy path. ``evidence``: share (0 to 1) of the critical path's time by kind of truth ("measured",
    "profiled", "modelled", "assumed"). ``notes``: what is legal, but worth knowing. With ``problems`` of kind "hang" or
    "mismatch" there are no timelines.
    """

    step_time_us: float
    timelines: list[Timeline] = field(default_factory=list)
    critical: int = 0
    evidence: dict[str, float] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    critical_path: CriticalPath | None = None
    band: Band | None = None
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
