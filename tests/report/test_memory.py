"""Who holds what at the peak of each phase."""

from __future__ import annotations

import numpy as np

from echo_hooks.graph.memory import HOLDERS
from echo_hooks.report.memory import phase_peaks

MIB = 1 << 20


def test_peaks_by_phase(run):
    forward, backward = phase_peaks(run.traces[0])
    assert (forward.phase, forward.bytes) == ("forward", 60 * MIB)
    assert forward.holders == {"parameters": 40 * MIB, "activations": 20 * MIB}
    assert (backward.phase, backward.bytes) == ("backward", 70 * MIB)
    assert backward.holders == {"parameters": 40 * MIB, "activations": 20 * MIB, "gradients": 10 * MIB}
    assert backward.modules == {"layers.*.mlp": 70 * MIB}


def test_a_free_counts_for_whoever_allocated(run):
    trace = run.traces[0]
    events = trace.memory_events
    events["holder"][3] = HOLDERS.index("other")  # labelled wrongly when freed
    more = {"record": 5, "storage": 9, "bytes": MIB, "stream": 0, "holder": 5, "module": 0, "phase": 2}
    trace.memory_events = {k: np.append(v, np.array(more[k], v.dtype)) for k, v in events.items()}
    optimizer = phase_peaks(trace)[-1]
    assert (optimizer.phase, optimizer.bytes) == ("optimizer", 51 * MIB)
    assert optimizer.holders == {"parameters": 40 * MIB, "gradients": 10 * MIB, "other": MIB}


def test_no_events(run):
    trace = run.traces[0]
    trace.memory_events = {k: v[:0] for k, v in trace.memory_events.items()}
    assert phase_peaks(trace) == []
