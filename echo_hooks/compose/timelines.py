"""From the engine's state to timelines: one step of every class on its own clock."""

from __future__ import annotations

import numpy as np

from echo_hooks.compose.breakdown import breakdown
from echo_hooks.compose.critical import critical_path, evidence_shares
from echo_hooks.compose.folding import Partition
from echo_hooks.compose.programs import SYNC, RoleProgram
from echo_hooks.compose.result import Breakdown, Composition, Timeline, expanded
from echo_hooks.compose.slack import record_slack
from echo_hooks.compose.state import State
from echo_hooks.compose.tables import Tables
from echo_hooks.compose.world import World
from echo_hooks.errors import UsageError


def measure(
    world: World,
    partition: Partition,
    tables: Tables,
    state: State,
    repeat: int,
    host_launch_us: float,
    with_slack: bool = False,
) -> Composition:
    """The last of ``repeat`` copies as a Composition, without its problems. Uses ``state`` up: its times become the
    timelines'."""
    done = completions(world, partition, tables, state, repeat)
    path = critical_path(world, tables, state, repeat, host_launch_us, done)
    slack = record_slack(tables, state, repeat, host_launch_us, float(done[:, -1].max())) if with_slack else None
    origin = float(state.origin.min())
    path.begin_us, path.end_us = path.begin_us - origin, path.end_us - origin
    timelines = []
    for c, ranks in enumerate(partition.ranks()):
        program = world.programs[world.role_of[ranks[0]]]
        period = float(done[c, -1] - done[c, 0]) / (repeat - 1)
        timelines.append(_timeline(world, tables, state, c, ranks, repeat, float(done[c, -1]), period, origin))
        timelines[-1].breakdown.step_us = period / program.steps
        if slack is not None:
            last = int(tables.classes.last0[c])
            # What only rounding makes differ from 0 is on the critical path.
            timelines[-1].slack_us = np.where(np.abs(mine := slack[last : last + program.n]) > 1e-6, mine, 0.0)
    steps = {p.steps for p in world.programs}
    if len(steps) > 1:
        raise UsageError(f"the ranks' programs hold different numbers of steps: {sorted(steps)}")
    return Composition(
        step_time_us=max(t.breakdown.step_us for t in timelines),
        timelines=timelines,
        critical=max(range(len(timelines)), key=lambda i: (_busy(timelines[i].breakdown), -i)),
        evidence=evidence_shares(world, tables, path),
        critical_path=path,
    )


def completions(world: World, partition: Partition, tables: Tables, state: State, repeat: int) -> np.ndarray:
    """When each copy is over, host and device: [classes, copies]."""
    done = np.zeros((len(partition.representative), repeat))
    for c, rank in enumerate(partition.representative.tolist()):
        n = world.programs[world.role_of[rank]].n
        first = int(tables.classes.instance0[c])
        for times in (state.issue, state.end):
            rows = times[first : first + n * repeat].reshape(repeat, n)
            done[c] = np.maximum(done[c], np.fmax.reduce(rows, axis=1, initial=0.0))
    return done


def _timeline(
    world: World,
    tables: Tables,
    state: State,
    c: int,
    ranks: np.ndarray,
    repeat: int,
    until: float,
    period: float,
    origin: float,
) -> Timeline:
    program = world.programs[world.role_of[ranks[0]]]
    n = program.n
    last = int(tables.classes.last0[c])
    instance = int(tables.classes.instance0[c]) + (repeat - 1) * n
    # Views, moved to the rank's own clock in place: copies would double the memory of an unfolded world.
    first = int(tables.classes.node0[c]) // repeat
    start, calls_ready = state.start[last : last + n], state.ready[first : first + len(program.call_record)]
    issue, end = state.issue[instance : instance + n], state.end[instance : instance + n]
    end[program.action == SYNC] = np.nan  # the engine keeps when the host went on there

    names: list[str] = []
    name_of_port = []
    for port in program.ports:
        name = world.groups[port.group].name
        if name not in names:
            names.append(name)
        name_of_port.append(names.index(name))
    name_of = np.full(n, -1, np.int64)
    name_of[program.call_record] = np.asarray(name_of_port, np.int64)[program.call_port] if names else -1
    ready = expanded(calls_ready, program.call_record, n)
    parts = breakdown(program.program.kind, name_of, names, start, ready, end, until, period, program.steps)
    slowdown = _slowdown(program, tables, state, c, repeat, start, end)
    zero = float(state.origin[c])
    for times in (issue, start, calls_ready, end):
        times -= zero
    return Timeline(
        representative=int(ranks[0]),
        ranks=tuple(ranks.tolist()),
        role=program.role.name,
        program=program.program,
        issue_us=issue,
        start_us=start,
        calls=program.call_record,
        calls_ready_us=calls_ready,
        end_us=end,
        slowdown=slowdown,
        breakdown=parts,
        offset_us=zero - origin,
    )


def _slowdown(
    program: RoleProgram, tables: Tables, state: State, c: int, repeat: int, start: np.ndarray, end: np.ndarray
) -> np.ndarray:
    """Time taken over time alone, per record; 1 where either is nothing or unknown."""
    classes, channels = tables.classes, tables.channels
    alone = program.run_us * classes.scale[c]
    taken = end - start
    channel = classes.channel[classes.port0[c] + program.call_port]
    slot = channels.slot0[channel] + (repeat - 1) * channels.calls[channel] + program.call_number
    alone[program.call_record] = state.slot_us[slot]
    taken[program.call_record] = state.slot_end[slot] - state.slot_ready[slot]
    with np.errstate(divide="ignore", invalid="ignore"):
        slowdown = taken / alone
    # What only rounding makes differ from 1 was not slowed down.
    slowed = (alone > 0) & (np.abs(slowdown - 1.0) > 1e-9) & ~np.isnan(slowdown)
    if not slowed.any():
        return np.broadcast_to(1.0, program.n)  # in an unfolded world as large as all other times of a rank
    return np.where(slowed, slowdown, 1.0)


def _busy(parts: Breakdown) -> float:
    return parts.compute_us + sum(parts.exposed_communication_us.values()) + parts.host_us
