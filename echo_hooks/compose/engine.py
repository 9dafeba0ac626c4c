"""The engine: all classes of ranks at once, host threads that issue, streams that run, calls that meet.

Durations are constant here, so every time is a maximum of earlier times plus a constant and does not depend on the
order in which agents get their turn: no clock is needed, only a stack of agents that may be able to go on. An agent
runs until it needs a time that is not known yet.

Semantics. A host thread issues its records in order, ``host_us`` after the one before (threads of one rank issue in the
order of the program: see below). A stream runs its records in order, each from the later of its issue and the end of
the one before. WAIT ends no earlier than its event. SYNC and HOST_CALL hold their thread. A CALL arrives at all its
meeting points when it starts; each point is served when all members have arrived and the point's call before is over (a
communicator runs its calls in order), takes its duration, and the kernel ends with its last part.

Threads. A rank's threads issue in the order of the trace, so that a block in one holds up what the others issued after
it. In a trace the backward pass runs in the thread that asked for it, or (traces of a profiler) in another that this
one waits for: either way nothing of the one can be issued before the other lets go. Of a thread that fetches data ahead
the trace does not say where it hands over to the main thread; the order in which all went well once has every handover
in it, while any other order could use data before they are there. It is late by no more than the fetcher's own waits.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from echo_hooks.compose.programs import CALL, HOST_CALL, RECORD, RUN, SYNC, WAIT
from echo_hooks.compose.state import ARRIVING, DONE, FREE, ON_CALL, ON_RECORD, State, compiled, new_state
from echo_hooks.compose.tables import Channels, Classes, Programs, Tables

QUEUE_DEPTH = 1024
"""Launches that a stream holds before the next launch blocks the host. CUDA documents no figure; 1,024 is what
measurements on NVIDIA devices find (NVIDIA developer forum, "CUDA kernel launch queue")."""


def run(
    tables: Tables,
    repeat: int,
    host_launch_us: float,
    queue_depth: int = QUEUE_DEPTH,
    *,
    jitter: float = 0.0,
    seed: int = 0,
) -> tuple[State, bool]:
    """Simulate ``repeat`` copies of all programs back to back; False when something is left that cannot go on.

    ``jitter``: sigma of a log-normal factor on every single kernel, drawn from ``seed``, its class and its place.
    """
    state = new_state(tables, repeat)
    finished = _run(
        tables.programs,
        tables.classes,
        tables.channels,
        state,
        repeat,
        host_launch_us,
        queue_depth,
        jitter,
        seed,
    )
    return state, bool(finished)


@compiled
def push(s: State, agent: int):
    """Let an agent be looked at again, once."""
    if not s.queued[agent]:
        s.queued[agent] = 1
        s.stack[s.top[0]] = agent
        s.top[0] += 1


@compiled
def await_call(s: State, slot: int, agent: int, node: int):
    """Hang an agent on a call; ``node`` is its place among all that may wait."""
    s.pending[agent] += 1
    s.node_agent[node] = agent
    s.next_node[node] = s.head[slot]
    s.head[slot] = node


@compiled
def wake(s: State, slot: int):
    """A call is served: agents that wait for no other may go on."""
    node = s.head[slot]
    while node >= 0:
        agent = s.node_agent[node]
        s.pending[agent] -= 1
        if s.pending[agent] == 0:
            push(s, agent)
        node = s.next_node[node]


@compiled
def _serve(ch: Channels, s: State, channel: int, repeat: int):
    """Settle the calls of a channel that are complete, in order, and free those that wait for them."""
    n = s.served[channel]
    total = ch.calls[channel] * repeat
    while n < total:
        slot = ch.slot0[channel] + n
        if s.arrived[slot] < ch.need[channel]:
            break
        ready = max(s.slot_ready[slot], s.channel_end[channel])
        s.slot_ready[slot] = ready
        s.slot_end[slot] = ready + s.slot_us[slot]
        s.channel_end[channel] = s.slot_end[slot]
        wake(s, slot)
        n += 1
    s.served[channel] = n


@compiled
def _arrive(
    p: Programs, k: Classes, ch: Channels, s: State, c: int, agent: int, copy: int, kernel: int, t: float, repeat: int
):
    """All parts of a kernel arrive at ``t``; the agent's ``pending`` counts those not served."""
    role = k.role[c]
    call0 = p.call0[role]
    calls = (p.call0[role + 1] if role + 1 < len(p.call0) else len(p.call_record)) - call0
    record = p.record0[role] + kernel
    s.kernel_start[agent] = t
    s.pending[agent] = 1  # so that a part served at once does not free the agent before the others have arrived
    for i in range(p.part_start[record], p.part_start[record + 1]):
        m = p.parts[i]
        call = call0 + m
        channel = k.channel[k.port0[c] + p.call_port[call]]
        number = copy * ch.calls[channel] + p.call_number[call]
        slot = ch.slot0[channel] + number
        s.arrived[slot] += 1
        s.slot_ready[slot] = max(s.slot_ready[slot], t)
        cost = k.cost0[c] + p.call_kind[call]
        s.slot_us[slot] = max(s.slot_us[slot], k.cost_us[cost] * p.call_share[call])
        if not k.buffered[cost]:
            await_call(s, slot, agent, k.node0[c] + copy * calls + m)
        if s.arrived[slot] == ch.need[channel]:
            _serve(ch, s, channel, repeat)
    s.pending[agent] -= 1


@compiled
def complete(p: Programs, k: Classes, ch: Channels, s: State, c: int, agent: int, copy: int, kernel: int, repeat: int):
    """All parts of a kernel are served: write their times, return the kernel's end."""
    role = k.role[c]
    record = p.record0[role] + kernel
    instance0 = k.instance0[c] + copy * p.n[role]
    t = s.kernel_start[agent]
    end = t
    for i in range(p.part_start[record], p.part_start[record + 1]):
        call = p.call0[role] + p.parts[i]
        channel = k.channel[k.port0[c] + p.call_port[call]]
        slot = ch.slot0[channel] + copy * ch.calls[channel] + p.call_number[call]
        cost = k.cost0[c] + p.call_kind[call]
        if k.buffered[cost]:
            part_ready, part_end = t, t + k.cost_us[cost] * p.call_share[call]
        else:
            part_ready, part_end = s.slot_ready[slot], s.slot_end[slot]
        end = max(end, part_end)
        part = p.call_record[call]
        s.end[instance0 + part] = part_end
        if copy == repeat - 1:
            s.start[k.last0[c] + part] = t
            s.ready[k.node0[c] // repeat + p.parts[i]] = part_ready
    s.end[instance0 + kernel] = end
    return end


@compiled
def latest(p: Programs, k: Classes, s: State, c: int, copy: int, record: int, t: float):
    """The end of all that a WAIT or SYNC waits for, no earlier than ``t``; NaN when some is not known."""
    role = k.role[c]
    n = p.n[role]
    for i in range(p.wait_start[p.record0[role] + record], p.wait_start[p.record0[role] + record + 1]):
        target = p.waits[i]
        if target < 0:
            if copy == 0:
                continue
            end = s.end[k.instance0[c] + (copy - 1) * n - 1 - target]
        else:
            end = s.end[k.instance0[c] + copy * n + target]
        if end != end:
            return np.nan
        t = max(t, end)
    return t


@compiled
def _release(p: Programs, k: Classes, ch: Channels, s: State, c: int, thread: int, repeat: int):
    """Let a host thread go on behind the SYNC or HOST_CALL that it waits for; False while it cannot."""
    agent = k.agent0[c] + thread
    instance = s.at[agent]
    n = p.n[k.role[c]]
    copy, record = instance // n, instance % n
    if p.action[p.record0[k.role[c]] + record] == SYNC:
        t = latest(p, k, s, c, copy, record, s.issue[k.instance0[c] + instance])
        if t != t:
            s.held[agent] = ON_RECORD
            return False
        s.end[k.instance0[c] + instance] = t
    else:
        if s.pending[agent] > 0:
            return False
        t = complete(p, k, ch, s, c, agent, copy, record, repeat)
    s.clock[agent] = t
    s.at[agent] = -1
    s.held[agent] = FREE
    return True


@compiled
def run_host(p: Programs, k: Classes, ch: Channels, s: State, c: int, repeat: int, launch_us: float, depth: int):
    """Issue until a thread is held; True when something was issued."""
    role = k.role[c]
    n, record0 = p.n[role], p.record0[role]
    begin = s.issued[c]
    s.host_held[c] = FREE
    while s.issued[c] < repeat * n:
        copy = s.issued[c] // n
        record = s.issued[c] - copy * n
        action = p.action[record0 + record]
        agent = k.agent0[c] + p.thread[record0 + record]
        if s.at[agent] >= 0 and not _release(p, k, ch, s, c, p.thread[record0 + record], repeat):
            s.host_held[c] = s.held[agent]
            break
        if record == 0 and copy == repeat - 1:
            s.origin[c] = s.clock[agent]
        t = s.clock[agent] + p.host_us[record0 + record]
        device = action in (RUN, CALL, WAIT, RECORD)
        if device:
            if action in (RUN, CALL):
                t += launch_us
            first = p.stream_start[p.stream0[role] + p.stream[record0 + record]]
            length = p.stream_start[p.stream0[role] + p.stream[record0 + record] + 1] - first
            before = copy * length + p.place[record0 + record] - depth
            if before >= 0:
                end = s.end[k.instance0[c] + before // length * n + p.stream_records[first + before % length]]
                if end != end:
                    s.host_held[c] = ON_RECORD
                    break
                t = max(t, end)
        t = max(t, s.last_issue[c])
        s.last_issue[c] = t
        s.clock[agent] = t
        instance = s.issued[c]
        s.issue[k.instance0[c] + instance] = t
        s.issued[c] += 1
        if action == SYNC:
            s.at[agent] = instance
        elif action == HOST_CALL:
            s.at[agent] = instance
            s.kernel_start[agent] = t
            s.held[agent] = ARRIVING
            s.pending[agent] = 1
    if s.issued[c] == repeat * n:
        s.host_held[c] = DONE
        for thread in range(k.threads[c]):
            agent = k.agent0[c] + thread
            if s.at[agent] >= 0 and not _release(p, k, ch, s, c, thread, repeat):
                s.host_held[c] = s.held[agent]
            elif s.at[agent] < 0:
                s.held[agent] = DONE
    return s.issued[c] > begin


@compiled
def _normal(seed: int, place: int):
    """A standard normal number that depends on its arguments only (splitmix64, then Box-Muller)."""
    x = np.uint64(seed) * np.uint64(0xD1342543DE82EF95) + np.uint64(place) * np.uint64(2) + np.uint64(1)
    uniform = np.empty(2)
    for i in range(2):
        z = x + np.uint64(i + 1) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
        uniform[i] = (float(z >> np.uint64(11)) + 0.5) / 9007199254740992.0  # 2**53
    return np.sqrt(-2.0 * np.log(uniform[0])) * np.cos(2.0 * np.pi * uniform[1])


@compiled
def _run_stream(
    p: Programs, k: Classes, ch: Channels, s: State, c: int, agent: int, repeat: int, jitter: float, seed: int
):
    """Run a stream's records until one cannot start or end; True when some ended."""
    role = k.role[c]
    n, record0 = p.n[role], p.record0[role]
    stream = p.stream0[role] + agent - k.agent0[c] - k.threads[c]
    first = p.stream_start[stream]
    length = p.stream_start[stream + 1] - first
    if length == 0:
        s.held[agent] = DONE
        return False
    copy = s.at[agent] // length
    place = s.at[agent] - copy * length
    moved = False
    while True:
        if copy == repeat:
            s.held[agent] = DONE
            break
        record = p.stream_records[first + place]
        if s.issued[c] <= copy * n + record:
            s.held[agent] = FREE
            break
        instance = k.instance0[c] + copy * n + record
        action = p.action[record0 + record]
        last = copy == repeat - 1
        t = max(s.clock[agent], s.issue[instance])
        if action == RUN:
            run_us = p.run_us[record0 + record] * k.scale[c]
            if jitter > 0.0:
                run_us *= np.exp(jitter * _normal(seed, instance))
            end = t + run_us
        elif action == RECORD:
            end = t
        elif action == WAIT:
            end = latest(p, k, s, c, copy, record, t)
            if end != end:
                s.held[agent] = ON_RECORD
                break
        else:
            if s.held[agent] != ON_CALL:
                _arrive(p, k, ch, s, c, agent, copy, record, t, repeat)
            if s.pending[agent] > 0:
                s.held[agent] = ON_CALL
                break
            s.held[agent] = FREE
            end = complete(p, k, ch, s, c, agent, copy, record, repeat)
        if action != CALL:
            s.end[instance] = end
            if last:
                s.start[k.last0[c] + record] = t
        s.clock[agent] = end
        moved = True
        place += 1
        if place == length:
            place = 0
            copy += 1
    s.at[agent] = copy * length + place
    return moved


@njit(cache=True)
def _run(
    p: Programs,
    k: Classes,
    ch: Channels,
    s: State,
    repeat: int,
    launch_us: float,
    depth: int,
    jitter: float,
    seed: int,
):
    for c in range(len(k.role)):
        push(s, k.agent0[c])
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
                    copy, record = divmod(s.at[other], p.n[k.role[c]])
                    s.held[other] = ON_CALL
                    _arrive(p, k, ch, s, c, other, copy, record, s.kernel_start[other], repeat)
                    if s.pending[other] == 0:
                        push(s, host)
            if moved:
                for other in range(streams, streams + k.streams[c]):
                    if s.held[other] == FREE:
                        push(s, other)
        else:
            moved = _run_stream(p, k, ch, s, c, agent, repeat, jitter, seed)
            if moved:
                if s.host_held[c] == ON_RECORD:
                    push(s, host)
                for other in range(streams, streams + k.streams[c]):
                    if s.held[other] == ON_RECORD:
                        push(s, other)
    finished = True
    for agent in range(len(k.agent_class)):
        finished &= s.held[agent] == DONE
    return finished
