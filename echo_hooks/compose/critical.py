"""The critical path: from the end of the step back to its begin, always to what released the record at hand."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from echo_hooks.compose.programs import CALL, HOST_CALL, RUN, SYNC, WAIT
from echo_hooks.compose.result import CriticalPath
from echo_hooks.compose.state import State, compiled
from echo_hooks.compose.tables import Channels, Classes, Programs, Tables
from echo_hooks.compose.world import World
from echo_hooks.graph.program import Evidence

_DEVICE, _START, _ISSUE, _PART = range(
    4
)  # where the walk stands: at a record's end, its start, its issue; a call's end


class Meetings(NamedTuple):
    """CSR: ends of each channel as (class, port); calls of each port (global number) in order; each call's kernel."""

    end_start: np.ndarray
    end_class: np.ndarray
    end_port: np.ndarray
    port_base: np.ndarray
    port_start: np.ndarray
    port_calls: np.ndarray
    kernel_of: np.ndarray


def critical_path(
    world: World, tables: Tables, state: State, repeat: int, host_launch_us: float, done: np.ndarray
) -> CriticalPath:
    """The path that ends with the last completion of all (ties: the lowest class). ``done``: [classes, copies]."""
    c = int(np.argmax(done[:, -1]))
    until = float(done[c, -1])
    period = (until - float(done[c, 0])) / (repeat - 1)
    n = int(tables.programs.n[tables.classes.role[c]])
    instance = int(tables.classes.instance0[c]) + (repeat - 1) * n
    action = world.programs[tables.classes.role[c]].action
    ends = state.end[instance : instance + n]
    last_device = np.flatnonzero((ends == until) & (action != SYNC))
    mode, record = (_DEVICE, int(last_device[-1])) if len(last_device) else (_ISSUE, n - 1)
    columns = _walk(
        tables.programs,
        tables.classes,
        tables.channels,
        state,
        _meetings(world, tables),
        repeat,
        host_launch_us,
        c,
        record,
        mode,
        until - period,
    )
    timeline, rows, host, begin, end = (column[::-1] for column in columns)
    return CriticalPath(timeline, rows, host.astype(bool), begin, end)


def evidence_shares(world: World, tables: Tables, path: CriticalPath) -> dict[str, float]:
    """Share of the path's time by kind of truth; host time was measured."""
    spent: dict[str, float] = {}
    length = path.end_us - path.begin_us
    spent["measured"] = float(length[path.host].sum())
    device = ~path.host
    for c in np.unique(path.timeline[device]).tolist():
        program = world.programs[tables.classes.role[c]]
        kinds = program.program.evidence.copy()
        kinds[program.call_record] = tables.call_evidence[tables.classes.cost0[c] + program.call_kind]
        mine = device & (path.timeline == c)
        for kind in Evidence:
            name = (Evidence.ASSUMED if kind == Evidence.NONE else kind).name.lower()
            time = float(length[mine][kinds[path.record[mine]] == kind].sum())
            spent[name] = spent.get(name, 0.0) + time
    total = sum(spent.values())
    return {name: time / total for name, time in sorted(spent.items()) if time > 0.0}


def _meetings(world: World, tables: Tables) -> Meetings:
    lengths = [len(e) for e in tables.ends]
    flat = [pair for of_channel in tables.ends for pair in of_channel]
    port_calls, port_start, kernel_of = [], [0], []
    for program in world.programs:
        order = np.argsort(program.call_port, kind="stable")
        port_calls.append(order)
        port_start += (port_start[-1] + np.cumsum(program.port_count)).tolist()
        kernels = np.zeros(len(program.call_record), np.int64)
        kernels[program.parts] = np.repeat(np.arange(program.n), np.diff(program.part_start))
        kernel_of.append(kernels)
    return Meetings(
        end_start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        end_class=np.asarray([c for c, _ in flat], np.int64),
        end_port=np.asarray([p for _, p in flat], np.int64),
        port_base=world.port_base.astype(np.int64),
        port_start=np.asarray(port_start, np.int64),
        port_calls=np.concatenate(port_calls).astype(np.int64),
        kernel_of=np.concatenate(kernel_of).astype(np.int64),
    )


@njit(cache=True)
def _walk(
    p: Programs,
    k: Classes,
    ch: Channels,
    s: State,
    meet: Meetings,
    repeat: int,
    launch_us: float,
    c: int,
    record: int,
    mode: int,
    low: float,
):
    """Segments of the path from its end back: class, record, whether host time, begin and end (engine clock)."""
    room, size = 1024, 0
    rows = np.empty((room, 3), np.int64)
    times = np.empty((room, 2))
    call = 0
    while True:
        role = k.role[c]
        n, record0 = p.n[role], p.record0[role]
        instance0, last0 = k.instance0[c] + (repeat - 1) * n, k.last0[c]
        begin, end, host, row = 0.0, 0.0, 0, record
        following = -1  # -1: the path ends here
        if mode == _PART:
            channel = k.channel[k.port0[c] + p.call_port[p.call0[role] + call]]
            slot = ch.slot0[channel] + (repeat - 1) * ch.calls[channel] + p.call_number[p.call0[role] + call]
            row = p.call_record[p.call0[role] + call]
            begin, end = s.ready[k.node0[c] // repeat + call], s.end[instance0 + row]
            if s.slot_ready[slot] == begin and s.slot_end[slot] < end:
                end = s.slot_end[slot]  # the record holds the whole kernel's end
            if begin == s.start[last0 + row]:
                following, next_class, next_record = _START, c, meet.kernel_of[p.call0[role] + call]
            else:
                number = p.call_number[p.call0[role] + call]
                for e in range(meet.end_start[channel], meet.end_start[channel + 1]):
                    other = meet.end_class[e]
                    of_role = k.role[other]
                    first = meet.port_start[meet.port_base[of_role] + meet.end_port[e]]
                    theirs = meet.port_calls[first + number]
                    if s.start[k.last0[other] + p.call_record[p.call0[of_role] + theirs]] == begin:
                        following, next_class = _START, other
                        next_record = meet.kernel_of[p.call0[of_role] + theirs]
                        break
                if following < 0 and number > 0:  # released by the channel's call before
                    e = meet.end_start[channel]
                    next_class = meet.end_class[e]
                    of_role = k.role[next_class]
                    first = meet.port_start[meet.port_base[of_role] + meet.end_port[e]]
                    following, next_record = _PART, meet.port_calls[first + number - 1]
        elif mode == _DEVICE:
            action = p.action[record0 + record]
            following, next_class, next_record = _START, c, record
            if action == RUN:
                begin, end = s.start[last0 + record], s.end[instance0 + record]
            elif action == WAIT:
                if s.end[instance0 + record] > s.start[last0 + record]:
                    following, next_record = _DEVICE, p.waits[p.wait_start[record0 + record]]
            elif action in (CALL, HOST_CALL):
                following = _PART
                latest = -1.0
                for i in range(p.part_start[record0 + record], p.part_start[record0 + record + 1]):
                    part = p.parts[i]
                    channel = k.channel[k.port0[c] + p.call_port[p.call0[role] + part]]
                    slot = ch.slot0[channel] + (repeat - 1) * ch.calls[channel] + p.call_number[p.call0[role] + part]
                    if s.slot_end[slot] > latest:
                        latest, next_record = s.slot_end[slot], part
        elif mode == _START:
            t = s.start[last0 + record]
            if p.action[record0 + record] == HOST_CALL:
                following, next_class, next_record = _ISSUE, c, record
            else:
                place = p.place[record0 + record]
                first = p.stream_start[p.stream0[role] + p.stream[record0 + record]]
                if place > 0 and s.end[instance0 + p.stream_records[first + place - 1]] == t:
                    following, next_class, next_record = _DEVICE, c, p.stream_records[first + place - 1]
                elif s.issue[instance0 + record] == t:
                    following, next_class, next_record = _ISSUE, c, record
        else:
            t = s.issue[instance0 + record]
            before = record - 1
            while before >= 0 and p.thread[record0 + before] != p.thread[record0 + record]:
                before -= 1
            action = p.action[record0 + record]
            gap = p.host_us[record0 + record] + (launch_us if action in (RUN, CALL) else 0.0)
            if before < 0:
                begin, end, host = t - gap, t, 1
            else:
                held = p.action[record0 + before] in (SYNC, HOST_CALL)
                clock = s.end[instance0 + before] if held else s.issue[instance0 + before]
                reached = clock + p.host_us[record0 + record]
                if action in (RUN, CALL):
                    reached += launch_us
                if t > reached and s.issue[instance0 + record - 1] == t:
                    following, next_class, next_record = _ISSUE, c, record - 1
                elif t == reached:
                    begin, end, host = clock, t, 1
                    following, next_class, next_record = _ISSUE, c, before
                    if held and s.end[instance0 + before] > s.issue[instance0 + before]:
                        following = _DEVICE
                        if p.action[record0 + before] == SYNC:
                            following = -1
                            for i in range(p.wait_start[record0 + before], p.wait_start[record0 + before + 1]):
                                target = p.waits[i]
                                if target >= 0 and s.end[instance0 + target] == clock:
                                    following, next_record = _DEVICE, target
                else:  # held up by a full launch queue
                    first = p.stream_start[p.stream0[role] + p.stream[record0 + record]]
                    place = p.place[record0 + record]
                    for i in range(place):
                        if s.end[instance0 + p.stream_records[first + i]] == t:
                            following, next_class, next_record = _DEVICE, c, p.stream_records[first + i]
        if end > begin:
            if size == room:
                room *= 2
                rows, times = _grown(rows, room), _grown(times, room)
            rows[size, 0], rows[size, 1], rows[size, 2] = c, row, host
            times[size, 0], times[size, 1] = max(begin, low), end
            size += 1
            if begin <= low:
                following = -1
        if following < 0:
            break
        mode, c, record = following, next_class, next_record
        call = next_record
    return rows[:size, 0], rows[:size, 1], rows[:size, 2], times[:size, 0], times[:size, 1]


@compiled
def _grown(a: np.ndarray, room: int):
    larger = np.empty((room, a.shape[1]), a.dtype)
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            larger[i, j] = a[i, j]
    return larger
