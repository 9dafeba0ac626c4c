"""Slack: by how much each record could end later before the step ends later.

One pass backwards over what depends on what: the latest time of a record's issue, start and end is the least, over all
that follows it directly, of the follower's latest time less what lies between (critical path method: Kelley and Walker,
1959). Durations are those of the simulation, with whatever slowed the operations down.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from echo_hooks.compose.engine import QUEUE_DEPTH
from echo_hooks.compose.programs import CALL, HOST_CALL, RECORD, RUN, SYNC, WAIT
from echo_hooks.compose.state import State, compiled
from echo_hooks.compose.tables import Channels, Classes, Programs, Tables

MOST_RECORDS = 4_000_000
"""Records of a copy beyond which no slack is worked out: the graph takes some 200 bytes a record."""

_ISSUE, _START, _END = range(3)  # a record's points in time; a call has two, its begin and its end


def record_slack(
    tables: Tables, state: State, repeat: int, host_launch_us: float, until_us: float
) -> np.ndarray | None:
    """Microseconds per record of the last copy (as ``Classes.last0`` numbers them), for a step that ends at
    ``until_us``: of its end on the device or of the wait, of its issue where it is neither. None for too large a world.
    """
    programs, classes, channels = tables.programs, tables.classes, tables.channels
    records = len(state.start)
    if records > MOST_RECORDS:
        return None
    calls = int(channels.calls.sum())
    # Per record at most: four of its thread, stream, queue and duration, one per wait, three per part.
    lengths = np.diff(np.append(programs.call0, len(programs.call_record)))[classes.role]
    role_waits = np.add.reduceat(np.append(np.diff(programs.wait_start), 0), programs.record0)
    room = 6 * records + int(role_waits[classes.role].sum()) + 3 * int(lengths.sum()) + 2 * calls
    source, target = np.empty(room, np.int32), np.empty(room, np.int32)
    length = np.empty(room)
    size = _edges(programs, classes, channels, state, repeat, host_launch_us, QUEUE_DEPTH, source, target, length)
    latest = _backwards(3 * records + 2 * calls, source[:size], target[:size], length[:size], until_us)
    slack = np.empty(records)
    _slacks(programs, classes, channels, state, repeat, latest, slack)
    return slack


@compiled
def _add(source, target, length, size: int, a: int, b: int, us: float):
    source[size], target[size], length[size] = a, b, us
    return size + 1


@njit(cache=True)
def _edges(
    p: Programs,
    k: Classes,
    ch: Channels,
    s: State,
    repeat: int,
    launch_us: float,
    depth: int,
    source: np.ndarray,
    target: np.ndarray,
    length: np.ndarray,
):
    """Fill in what follows what, and how much later at least; the number of edges."""
    size = 0
    first_call = 3 * len(s.start)
    for c in range(len(k.role)):
        role = k.role[c]
        n, record0 = p.n[role], p.record0[role]
        node0 = 3 * k.last0[c]
        instance0 = k.instance0[c] + (repeat - 1) * n
        before = np.full(k.threads[c], -1, np.int64)
        for r in range(n):
            action = p.action[record0 + r]
            issue, start, end = node0 + 3 * r + _ISSUE, node0 + 3 * r + _START, node0 + 3 * r + _END
            thread = p.thread[record0 + r]
            b = before[thread]
            before[thread] = r
            if b >= 0:
                held = p.action[record0 + b] in (SYNC, HOST_CALL)
                gap = p.host_us[record0 + r] + (launch_us if action in (RUN, CALL) else 0.0)
                size = _add(source, target, length, size, node0 + 3 * b + (_END if held else _ISSUE), issue, gap)
            if r > 0 and b != r - 1:
                size = _add(source, target, length, size, node0 + 3 * (r - 1) + _ISSUE, issue, 0.0)
            if action in (RUN, RECORD, WAIT, CALL):
                size = _add(source, target, length, size, issue, start, 0.0)
                first = p.stream_start[p.stream0[role] + p.stream[record0 + r]]
                place = p.place[record0 + r]
                if place > 0:
                    other = p.stream_records[first + place - 1]
                    size = _add(source, target, length, size, node0 + 3 * other + _END, start, 0.0)
                if place >= depth:
                    other = p.stream_records[first + place - depth]
                    size = _add(source, target, length, size, node0 + 3 * other + _END, issue, 0.0)
            if action in (RUN, RECORD, WAIT):
                taken = s.end[instance0 + r] - s.start[k.last0[c] + r] if action == RUN else 0.0
                size = _add(source, target, length, size, start, end, taken)
            elif action in (SYNC, HOST_CALL):
                size = _add(source, target, length, size, issue, end if action == SYNC else start, 0.0)
            if action in (WAIT, SYNC):
                for i in range(p.wait_start[record0 + r], p.wait_start[record0 + r + 1]):
                    if p.waits[i] >= 0:
                        size = _add(source, target, length, size, node0 + 3 * p.waits[i] + _END, end, 0.0)
            if action in (CALL, HOST_CALL):
                for i in range(p.part_start[record0 + r], p.part_start[record0 + r + 1]):
                    call = p.call0[role] + p.parts[i]
                    cost = k.cost0[c] + p.call_kind[call]
                    if k.buffered[cost]:
                        alone = k.cost_us[cost] * p.call_share[call]
                        size = _add(source, target, length, size, start, end, alone)
                    begins = first_call + 2 * _number(p, k, ch, c, call)
                    size = _add(source, target, length, size, start, begins, 0.0)
                    if not k.buffered[cost]:
                        size = _add(source, target, length, size, begins + 1, end, 0.0)
    for channel in range(len(ch.need)):
        slot0 = ch.slot0[channel] + (repeat - 1) * ch.calls[channel]
        for i in range(ch.calls[channel]):
            begins = first_call + 2 * (ch.first0[channel] + i)
            taken = s.slot_end[slot0 + i] - s.slot_ready[slot0 + i]
            size = _add(source, target, length, size, begins, begins + 1, taken)
            if i > 0:
                size = _add(source, target, length, size, begins - 1, begins, 0.0)
    return size


@compiled
def _number(p: Programs, k: Classes, ch: Channels, c: int, call: int):
    """Which call of a copy it is, of all channels'."""
    return ch.first0[k.channel[k.port0[c] + p.call_port[call]]] + p.call_number[call]


@njit(cache=True)
def _backwards(nodes: int, source: np.ndarray, target: np.ndarray, length: np.ndarray, until: float):
    """The latest time of every node; a node has its turn when all that follows it has had its own."""
    begins = np.zeros(nodes + 1, np.int64)
    followers = np.zeros(nodes, np.int32)
    for e in range(len(source)):
        begins[target[e] + 1] += 1
        followers[source[e]] += 1
    for v in range(nodes):
        begins[v + 1] += begins[v]
    order = np.empty(len(source), np.int32)
    at = begins[:-1].copy()
    for e in range(len(source)):
        order[at[target[e]]] = e
        at[target[e]] += 1
    latest = np.full(nodes, until)
    stack = np.empty(nodes, np.int32)
    top = 0
    for v in range(nodes):
        if followers[v] == 0:
            stack[top] = v
            top += 1
    while top > 0:
        top -= 1
        v = stack[top]
        for i in range(begins[v], begins[v + 1]):
            e = order[i]
            u = source[e]
            latest[u] = min(latest[u], latest[v] - length[e])
            followers[u] -= 1
            if followers[u] == 0:
                stack[top] = u
                top += 1
    return latest


@njit(cache=True)
def _slacks(p: Programs, k: Classes, ch: Channels, s: State, repeat: int, latest: np.ndarray, slack: np.ndarray):
    first_call = 3 * len(s.start)
    for c in range(len(k.role)):
        role = k.role[c]
        n, record0 = p.n[role], p.record0[role]
        instance0 = k.instance0[c] + (repeat - 1) * n
        for r in range(n):
            node = 3 * (k.last0[c] + r)
            if p.action[record0 + r] in (RUN, RECORD, WAIT, SYNC, CALL, HOST_CALL):
                slack[k.last0[c] + r] = latest[node + _END] - s.end[instance0 + r]
            else:
                slack[k.last0[c] + r] = latest[node + _ISSUE] - s.issue[instance0 + r]
        calls = (p.call0[role + 1] if role + 1 < len(p.call0) else len(p.call_record)) - p.call0[role]
        for m in range(calls):
            call = p.call0[role] + m
            record = p.call_record[call]
            if not k.buffered[k.cost0[c] + p.call_kind[call]]:  # it ends for all its members at once
                end = first_call + 2 * _number(p, k, ch, c, call) + 1
                channel = k.channel[k.port0[c] + p.call_port[call]]
                # Not the record's own end: that of a batch's last call is its kernel's.
                slot = ch.slot0[channel] + (repeat - 1) * ch.calls[channel] + p.call_number[call]
                slack[k.last0[c] + record] = latest[end] - s.slot_end[slot]
