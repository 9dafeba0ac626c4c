"""Where a simulation stands: what both engines keep of every record, agent, call and channel."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from echo_hooks.compose.tables import Classes, Tables

compiled = njit(cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)  # type: ignore[call-overload]
"""For functions that only compiled code calls: they compile faster without the wrappers for Python."""

# What holds an agent up.
FREE = 0  # nothing, or (a stream) its next record is not issued yet
ON_RECORD = 1  # a record of the same rank has not ended
ON_CALL = 2  # a call has not met all its members
DONE = 3
ARRIVING = 4  # a host call is issued and has still to arrive where it is met
SCHEDULED = 5  # a stream's next kernel or call starts at a later time that is known (changing rates only)
RUNNING = 6  # a kernel (changing rates only)


class State(NamedTuple):
    """Per record over all copies (``instance``): ``issue``, ``end``. Per record of the last copy: ``start``. Per call
    of the last copy (``node0`` // copies + call): ``ready``.
    Per agent: ``held``, ``clock`` (host: now; stream: end of its last record), ``at`` (host thread: the instance it
    waits for or -1; stream: its next place over all copies), ``kernel_start``, ``pending`` (parts not served).
    Per class: ``issued`` (records issued over all copies), ``host_held``, ``origin`` (host clock at the last copy's
    begin). Per call instance (``slot``): ``arrived``, ``slot_ready``, ``slot_us``, ``slot_end``, ``head``.
    """

    issue: np.ndarray
    end: np.ndarray
    start: np.ndarray
    ready: np.ndarray
    held: np.ndarray
    clock: np.ndarray
    at: np.ndarray
    kernel_start: np.ndarray
    pending: np.ndarray
    issued: np.ndarray
    host_held: np.ndarray
    origin: np.ndarray
    last_issue: np.ndarray
    arrived: np.ndarray
    slot_ready: np.ndarray
    slot_us: np.ndarray
    slot_end: np.ndarray
    head: np.ndarray
    next_node: np.ndarray
    node_agent: np.ndarray
    served: np.ndarray
    channel_end: np.ndarray
    stack: np.ndarray
    queued: np.ndarray
    top: np.ndarray


def new_state(tables: Tables, repeat: int) -> State:
    """Nothing issued yet, for ``repeat`` copies of every class's program."""
    programs, classes, channels = tables.programs, tables.classes, tables.channels
    records = int(programs.n[classes.role].sum())
    calls = np.diff(np.append(programs.call0, len(programs.call_record)))
    agents = len(classes.agent_class)
    slots = int(channels.calls.sum()) * repeat
    nodes = int(calls[classes.role].sum()) * repeat
    c = len(classes.role)
    slot_us = np.zeros(slots)
    for channel in range(len(channels.need)):
        count, first = int(channels.calls[channel]), int(channels.first0[channel])
        slot0 = int(channels.slot0[channel])
        slot_us[slot0 : slot0 + count * repeat] = np.tile(channels.slot_us[first : first + count], repeat)
    nan = np.nan
    return State(
        issue=np.full(records * repeat, nan),
        end=np.full(records * repeat, nan),
        start=np.full(records, nan),
        ready=np.full(nodes // repeat, nan),
        held=np.zeros(agents, np.int8),
        clock=np.zeros(agents),
        at=np.where(_is_host(classes), -1, 0).astype(np.int64),
        kernel_start=np.full(agents, nan),
        pending=np.zeros(agents, np.int64),
        issued=np.zeros(c, np.int64),
        host_held=np.zeros(c, np.int8),
        origin=np.zeros(c),
        last_issue=np.zeros(c),
        arrived=np.zeros(slots, np.int32),
        slot_ready=np.zeros(slots),
        slot_us=slot_us,
        slot_end=np.full(slots, nan),
        head=np.full(slots, -1, np.int64),
        next_node=np.full(nodes, -1, np.int64),
        node_agent=np.full(nodes, -1, np.int64),
        served=np.zeros(len(channels.need), np.int64),
        channel_end=np.zeros(len(channels.need)),
        stack=np.zeros(agents + 1, np.int64),
        queued=np.zeros(agents, np.uint8),
        top=np.zeros(1, np.int64),
    )


def _is_host(classes: Classes) -> np.ndarray:
    local = np.arange(len(classes.agent_class)) - classes.agent0[classes.agent_class]
    return local < classes.threads[classes.agent_class]
