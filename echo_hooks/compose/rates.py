"""How fast kernels and calls run now: what they slow each other down by, and their shares of the links."""

from __future__ import annotations

import numpy as np

from echo_hooks.compose.clock import IDLE, Clock, change
from echo_hooks.compose.interference import Interference
from echo_hooks.compose.state import ON_CALL, RUNNING, State, compiled
from echo_hooks.compose.tables import Channels, Classes, Programs
from echo_hooks.network.sharing import fill


@compiled
def _kernel_row(p: Programs, k: Classes, s: State, x: Interference, c: int, agent: int):
    """Row of the tables for the kernel that a stream runs."""
    record = front(p, k, s, c, agent)
    return x.table0[c] + x.kernel_of[p.record0[k.role[c]] + record] * x.calls[c]


@compiled
def front(p: Programs, k: Classes, s: State, c: int, agent: int):
    """The record at which a stream stands."""
    stream = p.stream0[k.role[c]] + agent - k.agent0[c] - k.threads[c]
    first = p.stream_start[stream]
    return p.stream_records[first + s.at[agent] % (p.stream_start[stream + 1] - first)]


@compiled
def retune(p: Programs, k: Classes, ch: Channels, s: State, x: Interference, q: Clock, c: int, now: float):
    """Take the rates on a class's GPU anew."""
    streams = k.agent0[c] + k.threads[c]
    stop = streams + k.streams[c]
    role = k.role[c]
    calls = (p.call0[role + 1] if role + 1 < len(p.call0) else len(p.call_record)) - p.call0[role]
    for agent in range(streams, stop):
        if s.held[agent] != RUNNING:
            continue
        row = _kernel_row(p, k, s, x, c, agent)
        factor = 1.0
        for other in range(streams, stop):
            if s.held[other] == ON_CALL:
                record = p.record0[role] + front(p, k, s, c, other)
                worst, moves = 0.0, False
                for i in range(p.part_start[record], p.part_start[record + 1]):
                    call = p.call0[role] + p.parts[i]
                    slot = _slot_of(p, k, ch, s, c, other, call)
                    kind = p.call_kind[call]
                    if q.phase[slot] != IDLE:
                        worst = max(x.moving[row + kind], worst if moves else 0.0)
                        moves = True
                    elif not moves:
                        worst = max(worst, x.waiting[row + kind])
                factor += worst
        change(q, now, agent, 1.0 / factor)
    for other in range(streams, stop):
        if s.held[other] != ON_CALL:
            continue
        record = p.record0[role] + front(p, k, s, c, other)
        copy = copy_of(p, k, s, c, other)
        for i in range(p.part_start[record], p.part_start[record + 1]):
            m = p.parts[i]
            call = p.call0[role] + m
            slot = _slot_of(p, k, ch, s, c, other, call)
            factor = 1.0
            for agent in range(streams, stop):
                if s.held[agent] == RUNNING:
                    factor += x.call[_kernel_row(p, k, s, x, c, agent) + p.call_kind[call]]
            node = k.node0[c] + copy * calls + m
            before = q.node_factor[node]
            if factor == before:
                continue
            q.node_factor[node] = factor
            if factor >= q.factor[slot]:
                q.factor[slot] = factor
            elif before == q.factor[slot]:
                largest, member = 1.0, s.head[slot]
                while member >= 0:
                    largest = max(largest, q.node_factor[member])
                    member = s.next_node[member]
                q.factor[slot] = largest
            if q.phase[slot] != IDLE:
                change(q, now, len(s.held) + slot, q.share[slot] / q.factor[slot])


@compiled
def copy_of(p: Programs, k: Classes, s: State, c: int, agent: int):
    stream = p.stream0[k.role[c]] + agent - k.agent0[c] - k.threads[c]
    return s.at[agent] // (p.stream_start[stream + 1] - p.stream_start[stream])


@compiled
def _slot_of(p: Programs, k: Classes, ch: Channels, s: State, c: int, agent: int, call: int):
    channel = k.channel[k.port0[c] + p.call_port[call]]
    return ch.slot0[channel] + copy_of(p, k, s, c, agent) * ch.calls[channel] + p.call_number[call]


@compiled
def touch(q: Clock, c: int):
    """The rates on a class's GPU must be taken anew before time goes on."""
    if not q.touched[c]:
        q.touched[c] = 1
        q.touched_list[q.touched_count[0]] = c
        q.touched_count[0] += 1


@compiled
def touch_members(k: Classes, s: State, q: Clock, slot: int):
    node = s.head[slot]
    while node >= 0:
        touch(q, k.agent_class[s.node_agent[node]])
        node = s.next_node[node]


@compiled
def share_links(ch: Channels, s: State, x: Interference, q: Clock, now: float):
    """Max-min shares of all calls that move data over links."""
    count = q.flow_count[0]
    start = np.zeros(count + 1, np.int64)
    for i in range(count):
        row = x.load_row[ch.first0[q.slot_channel[q.flows[i]]] + q.slot_number[q.flows[i]]]
        start[i + 1] = start[i] + x.load_start[row + 1] - x.load_start[row]
    resource = np.empty(start[count], np.int64)
    demand = np.empty(start[count])
    capacity = np.empty(start[count])
    used = 0
    for i in range(count):
        row = x.load_row[ch.first0[q.slot_channel[q.flows[i]]] + q.slot_number[q.flows[i]]]
        for j in range(x.load_start[row + 1] - x.load_start[row]):
            r = x.load_resource[x.load_start[row] + j]
            if q.dense[r] < 0:
                q.dense[r] = used
                capacity[used] = x.capacity[r]
                used += 1
            resource[start[i] + j] = q.dense[r]
            demand[start[i] + j] = x.load_demand[x.load_start[row] + j]
    for i in range(count):
        row = x.load_row[ch.first0[q.slot_channel[q.flows[i]]] + q.slot_number[q.flows[i]]]
        for j in range(x.load_start[row], x.load_start[row + 1]):
            q.dense[x.load_resource[j]] = -1
    shares = fill(start, resource, demand, capacity[:used])
    for i in range(count):
        slot = q.flows[i]
        q.share[slot] = shares[i]
        change(q, now, len(s.held) + slot, shares[i] / q.factor[slot])


@compiled
def join_links(ch: Channels, x: Interference, q: Clock, slot: int, joins: int):
    """A call begins (1) or stops (-1) to move data."""
    row = x.load_row[ch.first0[q.slot_channel[slot]] + q.slot_number[slot]]
    shared = False
    for j in range(x.load_start[row], x.load_start[row + 1]):
        r = x.load_resource[j]
        if joins < 0:
            q.on_resource[r] -= 1
        shared |= q.on_resource[r] > 0 or x.load_demand[j] > x.capacity[r]
        if joins > 0:
            q.on_resource[r] += 1
    if x.load_start[row] == x.load_start[row + 1]:
        return
    if joins > 0:
        q.flow_at[slot] = q.flow_count[0]
        q.flows[q.flow_count[0]] = slot
        q.flow_count[0] += 1
    else:
        last = q.flows[q.flow_count[0] - 1]
        q.flows[q.flow_at[slot]] = last
        q.flow_at[last] = q.flow_at[slot]
        q.flow_count[0] -= 1
    if shared:
        q.links_touched[0] = 1
