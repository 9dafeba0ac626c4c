"""The engine for rates that change: kernels and communication slow each other down, and operations share links.

The semantics are those of ``engine``; what is new is a clock. A running kernel or call has work left, in microseconds
of its own pace when alone, and a rate. Whenever something starts or ends on a GPU or on a link, the rates there are
taken anew:

- a kernel runs at 1 / (1 + the sum of what each call resident on its GPU adds, less while that call only waits);
- a call runs at its share of the links, over the largest factor that the kernels on a member's GPU give it (its members
  move in lockstep); the first part of it, its latency, takes no share.

As long as a rate does not change, an operation ends at its start plus its duration, so without overlap and sharing
every time equals the other engine's to the last bit. Only for plans known to come to their end.
"""

from __future__ import annotations

from numba import njit

from echo_hooks.compose.clock import IDLE, LATENCY, TRANSFER, Clock, begin, due, new_clock, pop
from echo_hooks.compose.engine import QUEUE_DEPTH, await_call, complete, latest, push, run_host, wake
from echo_hooks.compose.interference import Interference
from echo_hooks.compose.programs import CALL, RECORD, RUN, WAIT
from echo_hooks.compose.rates import copy_of, front, join_links, retune, share_links, touch, touch_members
from echo_hooks.compose.state import (
    ARRIVING,
    DONE,
    FREE,
    ON_CALL,
    ON_RECORD,
    RUNNING,
    SCHEDULED,
    State,
    compiled,
    new_state,
)
from echo_hooks.compose.tables import Channels, Classes, Programs, Tables


def run_fluid(
    tables: Tables, interference: Interference, repeat: int, host_launch_us: float, queue_depth: int = QUEUE_DEPTH
) -> State:
    """Simulate ``repeat`` copies of all programs back to back."""
    state = new_state(tables, repeat)
    clock = new_clock(tables, state, len(interference.capacity), repeat)
    finished = _run(
        tables.programs,
        tables.classes,
        tables.channels,
        state,
        interference,
        clock,
        repeat,
        host_launch_us,
        queue_depth,
    )
    assert finished, "a plan that ends with constant durations ends with any"
    return state


# ---- calls ----


@compiled
def _arrive(
    p: Programs,
    k: Classes,
    ch: Channels,
    s: State,
    x: Interference,
    q: Clock,
    c: int,
    agent: int,
    copy: int,
    kernel: int,
    repeat: int,
    now: float,
):
    """All parts of a kernel arrive; those that are complete begin."""
    role = k.role[c]
    call0 = p.call0[role]
    calls = (p.call0[role + 1] if role + 1 < len(p.call0) else len(p.call_record)) - call0
    record = p.record0[role] + kernel
    s.kernel_start[agent] = now
    s.pending[agent] = 0
    for i in range(p.part_start[record], p.part_start[record + 1]):
        m = p.parts[i]
        call = call0 + m
        channel = k.channel[k.port0[c] + p.call_port[call]]
        slot = ch.slot0[channel] + copy * ch.calls[channel] + p.call_number[call]
        s.arrived[slot] += 1
        s.slot_ready[slot] = now
        cost = k.cost0[c] + p.call_kind[call]
        s.slot_us[slot] = max(s.slot_us[slot], k.cost_us[cost] * p.call_share[call])
        q.latency_us[slot] = max(q.latency_us[slot], x.latency_us[cost] * p.call_share[call])
        if not k.buffered[cost]:
            await_call(s, slot, agent, k.node0[c] + copy * calls + m)
        _next_call(k, ch, s, x, q, channel, repeat, now)


@compiled
def _next_call(k: Classes, ch: Channels, s: State, x: Interference, q: Clock, channel: int, repeat: int, now: float):
    """Begin a channel's next call if all its members are there and the one before is over."""
    n = s.served[channel]
    if n == ch.calls[channel] * repeat:
        return
    slot = ch.slot0[channel] + n
    if s.arrived[slot] < ch.need[channel] or q.phase[slot] != IDLE:
        return
    s.slot_ready[slot] = now
    touch_members(k, s, q, slot)
    item = len(s.held) + slot
    q.share[slot] = 1.0
    latency = min(q.latency_us[slot], s.slot_us[slot])
    row = x.load_row[ch.first0[channel] + q.slot_number[slot]]
    if x.load_start[row] == x.load_start[row + 1]:  # shares no link: one phase, so that its end is not rounded twice
        q.phase[slot] = TRANSFER
        begin(q, now, item, s.slot_us[slot], 1.0 / q.factor[slot])
    elif latency > 0.0:
        q.phase[slot] = LATENCY
        begin(q, now, item, latency, 1.0 / q.factor[slot])
    else:
        q.phase[slot] = TRANSFER
        begin(q, now, item, s.slot_us[slot], 1.0 / q.factor[slot])
        join_links(ch, x, q, slot, 1)


@compiled
def _call_due(
    p: Programs, k: Classes, ch: Channels, s: State, x: Interference, q: Clock, slot: int, repeat: int, now: float
):
    """A call's latency is over, or all of it."""
    channel = q.slot_channel[slot]
    if q.phase[slot] == LATENCY:
        q.phase[slot] = TRANSFER
        latency = min(q.latency_us[slot], s.slot_us[slot])
        begin(q, now, len(s.held) + slot, s.slot_us[slot] - latency, 1.0 / q.factor[slot])
        join_links(ch, x, q, slot, 1)
        return
    q.phase[slot] = IDLE
    if q.flow_at[slot] >= 0:
        join_links(ch, x, q, slot, -1)
        q.flow_at[slot] = -1
    s.slot_end[slot] = now
    s.channel_end[channel] = now
    s.served[channel] += 1
    wake(s, slot)
    _next_call(k, ch, s, x, q, channel, repeat, now)
    touch_members(k, s, q, slot)


# ---- streams ----


@compiled
def _run_stream(
    p: Programs,
    k: Classes,
    ch: Channels,
    s: State,
    x: Interference,
    q: Clock,
    c: int,
    agent: int,
    repeat: int,
    now: float,
):
    """Run a stream's records until one takes time, lies ahead or is held up; True when some ended."""
    role = k.role[c]
    n, record0 = p.n[role], p.record0[role]
    stream = p.stream0[role] + agent - k.agent0[c] - k.threads[c]
    first = p.stream_start[stream]
    length = p.stream_start[stream + 1] - first
    if length == 0:
        s.held[agent] = DONE
        return False
    moved = False
    while True:
        copy = s.at[agent] // length
        if copy == repeat:
            s.held[agent] = DONE
            break
        record = p.stream_records[first + s.at[agent] - copy * length]
        if s.issued[c] <= copy * n + record:
            s.held[agent] = FREE
            break
        instance = k.instance0[c] + copy * n + record
        action = p.action[record0 + record]
        last = copy == repeat - 1
        t = max(s.clock[agent], s.issue[instance])
        if action == RECORD:
            end = t
        elif action == RUN and not x.overlaps:  # nothing changes a kernel's rate: its end is known before its time
            end = t + p.run_us[record0 + record] * k.scale[c]
        elif action == WAIT:
            end = latest(p, k, s, c, copy, record, t)
            if end != end:
                s.held[agent] = ON_RECORD
                break
        elif s.held[agent] == ON_CALL:
            if s.pending[agent] > 0:
                break
            s.held[agent] = FREE
            end = complete(p, k, ch, s, c, agent, copy, record, repeat)
            q.calls_on[c] -= 1
            touch(q, c)
        else:
            if t > now:
                s.held[agent] = SCHEDULED
                due(q, t, agent)
                break
            if action == RUN:
                s.held[agent] = RUNNING
                if last:
                    s.start[k.last0[c] + record] = t
                begin(q, now, agent, p.run_us[record0 + record] * k.scale[c], 1.0)
                if q.calls_on[c] > 0:
                    touch(q, c)
                break
            s.held[agent] = ON_CALL
            q.calls_on[c] += 1
            _arrive(p, k, ch, s, x, q, c, agent, copy, record, repeat, now)
            touch(q, c)
            if s.pending[agent] > 0:
                break
            continue
        if action != CALL:
            s.end[instance] = end
            if last:
                s.start[k.last0[c] + record] = t
        s.clock[agent] = end
        s.at[agent] += 1
        moved = True
    return moved


@compiled
def _kernel_due(p: Programs, k: Classes, ch: Channels, s: State, x: Interference, q: Clock, agent: int, now: float):
    """A stream's kernel is over, or a start that lay ahead has come."""
    c = k.agent_class[agent]
    if s.held[agent] == RUNNING:
        role = k.role[c]
        copy = copy_of(p, k, s, c, agent)
        record = front(p, k, s, c, agent)
        s.end[k.instance0[c] + copy * p.n[role] + record] = now
        s.clock[agent] = now
        s.at[agent] += 1
        s.held[agent] = FREE
        if q.calls_on[c] > 0:
            touch(q, c)
        _wake(k, s, c)
    else:
        s.held[agent] = FREE
    push(s, agent)


@compiled
def _wake(k: Classes, s: State, c: int):
    """Something ended on a class: look again at all that waits for a record there."""
    streams = k.agent0[c] + k.threads[c]
    if s.host_held[c] == ON_RECORD:
        push(s, k.agent0[c])
    for other in range(streams, streams + k.streams[c]):
        if s.held[other] == ON_RECORD:
            push(s, other)


@njit(cache=True)
def _run(
    p: Programs,
    k: Classes,
    ch: Channels,
    s: State,
    x: Interference,
    q: Clock,
    repeat: int,
    launch_us: float,
    depth: int,
):
    for c in range(len(k.role)):
        push(s, k.agent0[c])
    now = 0.0
    agents = len(s.held)
    while True:
        while s.top[0] > 0:
            s.top[0] -= 1
            agent = s.stack[s.top[0]]
            s.queued[agent] = 0
            c = k.agent_class[agent]
            host, streams = k.agent0[c], k.agent0[c] + k.threads[c]
            if agent < streams:
                moved = run_host(p, k, ch, s, c, repeat, launch_us, depth)
                for other in range(host, streams):
                    if s.held[other] == ARRIVING:
                        s.held[other] = SCHEDULED
                        due(q, s.kernel_start[other], other)
                if moved:
                    for other in range(streams, streams + k.streams[c]):
                        if s.held[other] == FREE:
                            push(s, other)
            elif s.held[agent] in (RUNNING, SCHEDULED):
                continue
            elif _run_stream(p, k, ch, s, x, q, c, agent, repeat, now):
                _wake(k, s, c)
        if x.overlaps:
            for i in range(q.touched_count[0]):
                retune(p, k, ch, s, x, q, q.touched_list[i], now)
                q.touched[q.touched_list[i]] = 0
            q.touched_count[0] = 0
        if q.links_touched[0]:
            q.links_touched[0] = 0
            share_links(ch, s, x, q, now)
        if q.heap_size[0] == 0:
            break
        now = q.heap_time[0]
        item = pop(q)
        if item < 0:
            continue
        if item >= agents:
            _call_due(p, k, ch, s, x, q, item - agents, repeat, now)
        elif item < k.agent0[k.agent_class[item]] + k.threads[k.agent_class[item]]:
            c = k.agent_class[item]
            copy, record = divmod(s.at[item], p.n[k.role[c]])
            s.held[item] = ON_CALL
            _arrive(p, k, ch, s, x, q, c, item, copy, record, repeat, now)
            if s.pending[item] == 0:
                push(s, item)
        else:
            _kernel_due(p, k, ch, s, x, q, item, now)
    finished = True
    for agent in range(agents):
        finished &= s.held[agent] == DONE
    return finished
