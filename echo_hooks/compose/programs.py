"""Rank programs as the engine wants them: one action per record, its waits resolved to records, its calls numbered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from echo_hooks.errors import UsageError
from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.ops import OpSignature
from echo_hooks.graph.program import HOST_STREAM, Kind, Program
from echo_hooks.graph.roles import Role
from echo_hooks.graph.rundir import RankTrace

# What the engine does at a record.
HOST = 0  # host time only
RUN = 1  # a kernel or copy on a stream
RECORD = 2
WAIT = 3
SYNC = 4
CALL = 5  # communication on a stream; its parts are all calls of the batch
HOST_CALL = 6  # communication that blocks the host
PART = 7  # a call of a batch that is not its last: belongs to the kernel that the last one issues


@dataclass(frozen=True)
class Port:
    """Where a program meets others: a group's collectives (``peer`` -1), or sends to / recvs from one peer in it."""

    group: int
    kind: int
    peer: int


@dataclass(frozen=True)
class Call:
    """What must agree between the ranks that meet in a call, and what its cost depends on.

    ``root``: place of the root in the group, -1 for none. ``total_bytes``/``count``: of all calls of its batch on the
    same port with the same operation, which travel as one. ``objects``: pickled ones, as long as the longest member's.
    """

    port: int
    kind: int
    name: str
    reduce: str
    bytes: int
    dtype: str
    root: int
    count: int
    total_bytes: int
    input_splits: tuple[int, ...] = ()
    output_splits: tuple[int, ...] = ()
    objects: bool = False

    @property
    def agreement(self) -> tuple:
        """What all members of a collective have in common; bytes of uneven all-to-alls and of objects may differ."""
        uneven = self.objects or bool(self.input_splits or self.output_splits)
        return (self.name, self.reduce, -1 if uneven else self.bytes, self.dtype, self.root)


@dataclass
class RoleProgram:
    """One role's program of ``n`` records.

    Per record: ``action``, ``host_us`` (with the host's own work), ``run_us`` (duration alone of RUN), ``place``
    (position in its stream's list), and CSR lists ``waits`` (WAIT and SYNC: records to wait for; -1-i is record i
    of the copy before) and ``parts`` (CALL and HOST_CALL: indices of calls). Per call, in program order:
    ``call_record``, ``call_port``, ``call_kind`` (index into ``calls``), ``call_number`` (its place among the
    port's calls) and ``call_share`` (of its batch's duration). ``stream_start``/``stream_records``: CSR, what each
    stream runs in order. ``step_ends``: of a whole program, set-up and warm-up included, see RankTrace; None for
    the measured steps alone.
    """

    role: Role
    program: Program
    ops: list[OpSignature]
    steps: int
    n: int
    action: np.ndarray
    host_us: np.ndarray
    run_us: np.ndarray
    place: np.ndarray
    thread: np.ndarray
    wait_start: np.ndarray
    waits: np.ndarray
    part_start: np.ndarray
    parts: np.ndarray
    stream_start: np.ndarray
    stream_records: np.ndarray
    ports: list[Port]
    port_count: np.ndarray
    calls: list[Call]
    call_record: np.ndarray
    call_port: np.ndarray
    call_kind: np.ndarray
    call_number: np.ndarray
    call_share: np.ndarray
    step_ends: tuple[int, ...] | None = None

    @property
    def threads(self) -> int:
        return int(self.thread.max()) + 1 if self.n else 1

    def site(self, record: int) -> str:
        return self.program.strings[int(self.program.site[record])]

    def where(self, record: int) -> str:
        """Source line, module and how many optimizer steps came before, as far as known."""
        module = self.program.strings[int(self.program.module[record])]
        steps = int(np.searchsorted(self.step_ends, record, side="right")) if self.step_ends else 0
        text = self.site(record) or "unknown line"
        text += f" in {module}" if module else ""
        return text + (f" after {steps} optimizer step{'s' * (steps > 1)}" if steps else "")


def role_program(role: Role, trace: RankTrace, groups: GroupTable, timed: bool = True) -> RoleProgram:
    """Lower the traced rank's program; with ``timed=False`` its prologue too, all kernels taking no time.

    Raises UsageError for a program the engine cannot run: a kernel without a duration, a call on a group
    that does not have the traced rank, a peer outside its group.
    """
    program = trace.program if timed else trace.whole()
    n = len(program)
    where = f"role {role.name!r} (rank {role.traced_rank})"
    kind = program.kind
    local = (kind == Kind.COMPUTE) | (kind == Kind.COPY)
    bad = local & ~(program.duration_us >= 0) & timed
    if bad.any():
        record = int(np.flatnonzero(bad)[0])
        op = int(program.op[record])
        name = trace.ops[op].name if op >= 0 else "?"
        raise UsageError(f"{where}: record {record} ({name}) has no duration; fill durations before composing")
    if not (program.host_us >= 0).all():
        raise UsageError(f"{where}: a record has a negative or missing host time")

    communication = (kind == Kind.COLLECTIVE) | (kind == Kind.SEND) | (kind == Kind.RECV)
    action = np.full(n, HOST, np.uint8)
    for of_kind, code in ((local, RUN), (kind == Kind.RECORD_EVENT, RECORD), (kind == Kind.WAIT_EVENT, WAIT)):
        action[of_kind] = code
    action[kind == Kind.SYNC] = SYNC
    action[communication] = np.where(program.stream[communication] == HOST_STREAM, HOST_CALL, CALL)
    part_start, parts = _parts(program, communication, action)

    on_stream = (action == RUN) | (action == RECORD) | (action == WAIT) | (action == CALL)
    if (program.stream[on_stream] < 0).any():
        raise UsageError(f"{where}: device work on a negative stream")
    stream_start, stream_records, place = _streams(program.stream, on_stream, len(program.streams))
    wait_start, waits = _waits(program, action, stream_start, stream_records)
    ports, calls, columns = _calls(program, trace.ops, groups, np.flatnonzero(communication), where)
    return RoleProgram(
        role=role,
        program=program,
        ops=trace.ops,
        steps=max(1, trace.steps),
        n=n,
        action=action,
        host_us=program.host_us + np.where((kind == Kind.HOST) & (program.duration_us > 0), program.duration_us, 0.0),
        run_us=np.where(local & timed, program.duration_us, 0.0),
        place=place,
        thread=np.unique(program.thread, return_inverse=True)[1].astype(np.int32),
        wait_start=wait_start,
        waits=waits,
        part_start=part_start,
        parts=parts,
        stream_start=stream_start,
        stream_records=stream_records,
        ports=ports,
        step_ends=None if timed else tuple(trace.step_ends),
        port_count=np.bincount(columns["call_port"], minlength=len(ports)),
        calls=calls,
        **columns,
    )


def _csr(lists: dict[int, list[int]], n: int) -> tuple[np.ndarray, np.ndarray]:
    length = np.zeros(n + 1, np.int64)
    for record, values in lists.items():
        length[record + 1] = len(values)
    flat = [value for record in sorted(lists) for value in lists[record]]
    return np.cumsum(length), np.asarray(flat, np.int64)


def _parts(program: Program, communication: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The calls of each kernel; marks all but the last record of a batch as PART."""
    parts: dict[int, list[int]] = {}
    open_batch: dict[int, list[int]] = {}
    last_of: dict[int, int] = {}
    for call, record in enumerate(np.flatnonzero(communication).tolist()):
        batch = int(program.batch[record])
        if batch < 0:
            parts[record] = [call]
            continue
        if batch in last_of:
            before = last_of[batch]
            action[before] = PART
            open_batch[batch].append(call)
        else:
            open_batch[batch] = [call]
        last_of[batch] = record
    for batch, calls in open_batch.items():
        parts[last_of[batch]] = calls
    return _csr(parts, len(action))


def _streams(stream: np.ndarray, on_stream: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    records = np.flatnonzero(on_stream)
    order = records[np.argsort(stream[records], kind="stable")]
    start = np.concatenate([[0], np.cumsum(np.bincount(stream[records], minlength=count))]).astype(np.int64)
    place = np.full(len(stream), -1, np.int64)
    place[order] = np.arange(len(order)) - start[stream[order]]
    return start, order.astype(np.int64), place


def _waits(program: Program, action: np.ndarray, start: np.ndarray, records: np.ndarray):
    """Records whose end a WAIT or SYNC waits for. An event not recorded earlier in the program is complete."""
    recorded = {int(program.event[i]): int(i) for i in np.flatnonzero(action == RECORD)}
    waits: dict[int, list[int]] = {}

    def last_before(stream: int, record: int) -> list[int]:
        of_stream = records[start[stream] : start[stream + 1]]
        if not len(of_stream):
            return []
        at = int(np.searchsorted(of_stream, record))
        return [int(of_stream[at - 1])] if at else [-1 - int(of_stream[-1])]

    for record in np.flatnonzero((action == WAIT) | (action == SYNC)).tolist():
        event, stream = int(program.event[record]), int(program.stream[record])
        if event >= 0:
            source = recorded.get(event, record)
            waits[record] = [source] if source < record else []
        elif action[record] == SYNC:
            streams = [stream] if stream >= 0 else range(len(start) - 1)
            waits[record] = [target for s in streams if s < len(start) - 1 for target in last_before(s, record)]
    return _csr(waits, len(action))


def _calls(program: Program, ops: list[OpSignature], groups: GroupTable, records: np.ndarray, where: str):
    """Ports, distinct calls, and the columns of the calls."""
    kind, group, peer, op = (getattr(program, c)[records].astype(np.int64) for c in ("kind", "group", "peer", "op"))
    size, dtype, batch = (getattr(program, c)[records].astype(np.int64) for c in ("bytes", "dtype", "batch"))
    m = len(records)
    collective = kind == Kind.COLLECTIVE
    _check_places(program, groups, records, kind, group, peer, where)

    port_rows = np.stack([group, kind, np.where(collective, -1, peer)], axis=1) if m else np.zeros((0, 3), np.int64)
    distinct, port = np.unique(port_rows, axis=0, return_inverse=True)
    port = port.reshape(-1)
    ports = [Port(*map(int, row)) for row in distinct]

    # Calls of a batch that travel as one: same port, operation, dtype and root.
    alone = np.where(batch >= 0, -1, np.arange(m))
    together = np.stack([batch, alone, port, op, dtype, peer], axis=1) if m else np.zeros((0, 6), np.int64)
    _, bundle = np.unique(together, axis=0, return_inverse=True)
    bundle = bundle.reshape(-1)
    count = np.bincount(bundle, minlength=1)[bundle] if m else np.zeros(0, np.int64)
    total = np.bincount(bundle, weights=size)[bundle].astype(np.int64) if m else np.zeros(0, np.int64)
    share = np.where(total > 0, size / np.maximum(total, 1), 1.0 / np.maximum(count, 1))

    rows = np.stack([port, op, size, dtype, peer, count, total], axis=1) if m else np.zeros((0, 7), np.int64)
    distinct, call = np.unique(rows, axis=0, return_inverse=True)
    calls = []
    for p, o, b, d, r, c, t in distinct.tolist():
        signature = ops[o] if o >= 0 else OpSignature(Kind(ports[p].kind).name.lower())
        root = -1
        if ports[p].kind == Kind.COLLECTIVE and r >= 0:
            root = groups[ports[p].group].position(r)
        calls.append(
            Call(
                port=p,
                kind=ports[p].kind,
                name=signature.name,
                reduce=str(signature.attr("reduce", "")),
                bytes=b,
                dtype=program.strings[d],
                root=root,
                count=c * int(signature.attr("count", 1) or 1),
                total_bytes=t,
                input_splits=tuple(signature.attr("input_splits") or ()),
                output_splits=tuple(signature.attr("output_splits") or ()),
                objects=bool(signature.attr("objects")),
            )
        )
    number = np.zeros(m, np.int64)
    if m:
        order = np.argsort(port, kind="stable")
        first = np.concatenate([[0], np.cumsum(np.bincount(port))])[port[order]]
        number[order] = np.arange(m) - first
    columns = {
        "call_record": records.astype(np.int64),
        "call_port": port.astype(np.int64),
        "call_kind": call.reshape(-1).astype(np.int64),
        "call_number": number,
        "call_share": share.astype(np.float64),
    }
    return ports, calls, columns


def _check_places(program, groups: GroupTable, records, kind, group, peer, where: str) -> None:
    def fail(mask: np.ndarray, text: Callable[[int], str]) -> None:
        if mask.any():
            i = int(np.flatnonzero(mask)[0])
            site = program.strings[int(program.site[records[i]])]
            raise UsageError(f"{where}: {Kind(int(kind[i])).name.lower()} at {site or 'unknown line'} {text(i)}")

    fail((group < 0) | (group >= len(groups)), lambda i: f"names group {group[i]}, there are {len(groups)}")
    outside = np.zeros(len(group), bool)
    for g in np.unique(group).tolist():
        outside |= (group == g) & (peer >= 0) & ~np.isin(peer, np.asarray(groups[g].ranks))
    fail(outside, lambda i: f"names rank {peer[i]}, not in group {group[i]} ({groups[int(group[i])].name})")
    fail((kind != Kind.COLLECTIVE) & (peer < 0), lambda i: "names no peer")
