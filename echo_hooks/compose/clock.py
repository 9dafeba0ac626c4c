"""The clock of the fluid engine: what is due when, and work that is done at changing rates."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from echo_hooks.compose.state import State, compiled
from echo_hooks.compose.tables import Tables

IDLE, LATENCY, TRANSFER = range(3)  # what a call instance does once its members are there


class Clock(NamedTuple):
    """Items are agents (a start that lies ahead, or a kernel that runs) and, behind them, call instances.

    Per item: ``left`` (us at rate 1), ``rate``, ``since``, ``version`` (heap entries of older versions are void).
    Per call instance: ``phase``, ``share`` of its links, ``factor`` by kernels, ``slot_channel``, ``slot_number`` (of
    the copy), ``latency_us``. Per class: ``calls_on`` (resident calls), ``touched`` (its rates are to be taken anew).
    Per node (a member's call): ``node_factor``. ``flows``: the calls that move data over links now.
    """

    left: np.ndarray
    rate: np.ndarray
    since: np.ndarray
    version: np.ndarray
    phase: np.ndarray
    share: np.ndarray
    factor: np.ndarray
    slot_channel: np.ndarray
    slot_number: np.ndarray
    latency_us: np.ndarray
    calls_on: np.ndarray
    node_factor: np.ndarray
    touched: np.ndarray
    touched_list: np.ndarray
    touched_count: np.ndarray
    links_touched: np.ndarray
    flows: np.ndarray
    flow_at: np.ndarray
    flow_count: np.ndarray
    on_resource: np.ndarray
    dense: np.ndarray
    heap_time: np.ndarray
    heap_item: np.ndarray
    heap_version: np.ndarray
    heap_size: np.ndarray


def new_clock(tables: Tables, state: State, resources: int, repeat: int) -> Clock:
    """The clock of a simulation that has not begun."""
    channels = tables.channels
    agents, slots = len(tables.classes.agent_class), len(state.slot_end)
    slot_channel = np.zeros(slots, np.int64)
    slot_number = np.zeros(slots, np.int64)
    for channel in range(len(channels.need)):
        count, slot0 = int(channels.calls[channel]), int(channels.slot0[channel])
        slot_channel[slot0 : slot0 + count * repeat] = channel
        slot_number[slot0 : slot0 + count * repeat] = np.tile(np.arange(count), repeat)
    room = 4 * (agents + slots) + 64
    return Clock(
        left=np.zeros(agents + slots),
        rate=np.zeros(agents + slots),
        since=np.zeros(agents + slots),
        version=np.zeros(agents + slots, np.int64),
        phase=np.zeros(slots, np.int8),
        share=np.ones(slots),
        factor=np.ones(slots),
        slot_channel=slot_channel,
        slot_number=slot_number,
        latency_us=np.zeros(slots),
        calls_on=np.zeros(len(tables.classes.role), np.int64),
        node_factor=np.ones(len(state.next_node)),
        touched=np.zeros(len(tables.classes.role), np.uint8),
        touched_list=np.zeros(len(tables.classes.role), np.int64),
        touched_count=np.zeros(1, np.int64),
        links_touched=np.zeros(1, np.int64),
        flows=np.zeros(len(channels.need) + 1, np.int64),
        flow_at=np.full(slots, -1, np.int64),
        flow_count=np.zeros(1, np.int64),
        on_resource=np.zeros(resources, np.int64),
        dense=np.full(resources, -1, np.int64),
        heap_time=np.zeros(room),
        heap_item=np.zeros(room, np.int64),
        heap_version=np.zeros(room, np.int64),
        heap_size=np.zeros(1, np.int64),
    )


@compiled
def due(q: Clock, time: float, item: int):
    """Item is due at ``time``; what was due for it before no longer is."""
    q.version[item] += 1
    if q.heap_size[0] == len(q.heap_time):
        q.heap_size[0] = _compact(q)
    _sift(q, q.heap_size[0], time, item, q.version[item])
    q.heap_size[0] += 1


@compiled
def _sift(q: Clock, i: int, time: float, item: int, version: int):
    """Put an entry into the heap of the first i."""
    while i > 0:
        up = (i - 1) >> 1
        if q.heap_time[up] < time or (q.heap_time[up] == time and q.heap_item[up] <= item):
            break
        q.heap_time[i], q.heap_item[i], q.heap_version[i] = q.heap_time[up], q.heap_item[up], q.heap_version[up]
        i = up
    q.heap_time[i], q.heap_item[i], q.heap_version[i] = time, item, version


@compiled
def _compact(q: Clock):
    """Drop void entries; at most one per item is left, a quarter of the room."""
    size = q.heap_size[0]
    kept = 0
    for i in range(size):
        time, item, version = q.heap_time[i], q.heap_item[i], q.heap_version[i]
        if version == q.version[item]:
            _sift(q, kept, time, item, version)
            kept += 1
    return kept


@compiled
def pop(q: Clock):
    """Remove the first entry; its item, or -1 if the entry is void."""
    item, version = q.heap_item[0], q.heap_version[0]
    size = q.heap_size[0] - 1
    q.heap_size[0] = size
    time, last, last_version = q.heap_time[size], q.heap_item[size], q.heap_version[size]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            q.heap_time[right] < q.heap_time[child]
            or (q.heap_time[right] == q.heap_time[child] and q.heap_item[right] < q.heap_item[child])
        ):
            child = right
        if time < q.heap_time[child] or (time == q.heap_time[child] and last <= q.heap_item[child]):
            break
        q.heap_time[i], q.heap_item[i] = q.heap_time[child], q.heap_item[child]
        q.heap_version[i] = q.heap_version[child]
        i = child
    q.heap_time[i], q.heap_item[i], q.heap_version[i] = time, last, last_version
    return item if version == q.version[item] else -1


@compiled
def begin(q: Clock, now: float, item: int, work: float, rate: float):
    """Let ``item``, with ``work`` left, go on at ``rate`` from ``now`` (us)."""
    q.left[item], q.rate[item], q.since[item] = work, rate, now
    due(q, now + work / rate, item)


@compiled
def change(q: Clock, now: float, item: int, rate: float):
    """Let a running item go on at another rate from ``now`` (us)."""
    if rate != q.rate[item]:
        q.left[item] = max(0.0, q.left[item] - (now - q.since[item]) * q.rate[item])
        begin(q, now, item, q.left[item], rate)
