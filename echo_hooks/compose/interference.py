"""What slows what down, as tables for the fluid engine: kernels against calls, calls against each other on links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from echo_hooks.compose.costs import Costs, uneven
from echo_hooks.compose.folding import Partition
from echo_hooks.compose.links import Links
from echo_hooks.compose.programs import RUN, Call, RoleProgram
from echo_hooks.compose.tables import Tables, cost_of
from echo_hooks.compose.world import World, calls_of_port
from echo_hooks.graph.ops import OpSignature
from echo_hooks.graph.program import Kind
from echo_hooks.overlap.pair import Call as PairCall
from echo_hooks.overlap.pair import Kernel


class Overlap(Protocol):
    """How much a kernel and a communication on one GPU slow each other down; see ``echo_hooks.overlap``."""

    def slowdowns(self, pairs: Sequence[tuple[Kernel, PairCall]]) -> np.ndarray:
        """Factors [n, 3], 1 for none: of the kernel while the communication moves data, of the kernel while it only
        waits for a member, of the communication while the kernel runs. All distinct pairs of a plan are asked at
        once."""
        ...


class Interference(NamedTuple):
    """What slows what down.

    ``kernel_of``: per record of all programs, its row among its role's distinct kernels. ``table0``: per class, where
    its part of the tables begins; entry ``table0[c] + kernel * calls[c] + call`` of ``moving`` and ``waiting`` is what
    a call adds to the kernel's factor while it moves data and while it waits for members, of ``call`` what the kernel
    adds to the call's. ``calls``: distinct calls per class. ``overlaps``: whether any entry is above 0.

    ``load_row``: per call of a copy (as ``Channels.first0`` numbers them), its row of the CSR ``load_start``,
    ``load_resource``, ``load_demand``: bytes per us that it would move over each resource at its pace alone.
    ``capacity``: bytes per us. Resources that the calls on them can never fill are left out. ``latency_us``: per class
    and distinct call, the part of its duration that links do not stretch.
    """

    kernel_of: np.ndarray
    table0: np.ndarray
    moving: np.ndarray
    waiting: np.ndarray
    call: np.ndarray
    calls: np.ndarray
    overlaps: bool
    latency_us: np.ndarray
    load_row: np.ndarray
    load_start: np.ndarray
    load_resource: np.ndarray
    load_demand: np.ndarray
    capacity: np.ndarray

    @property
    def matters(self) -> bool:
        """Whether any rate can ever change."""
        return bool(self.overlaps or len(self.load_resource))


def build_interference(
    world: World, partition: Partition, tables: Tables, costs: Costs, overlap: Overlap | None, links: Links | None
) -> Interference:
    """Tables of what slows what: overlap factors per pair of kernel and call, loads per call and link."""
    kernels = [_distinct_kernels(program) for program in world.programs]
    table0, moving, waiting, call = _overlap_tables(world, partition, costs, overlap, kernels)
    row, start, resource, demand, capacity = _loads(world, partition, tables, links)
    return Interference(
        kernel_of=np.concatenate([of_record for of_record, _ in kernels]),
        table0=table0,
        moving=moving,
        waiting=waiting,
        call=call,
        calls=np.asarray([len(world.programs[r].calls) for r in tables.classes.role], np.int64),
        overlaps=bool((moving > 0).any() or (waiting > 0).any() or (call > 0).any()),
        latency_us=tables.call_latency_us,
        load_row=row,
        load_start=start,
        load_resource=resource,
        load_demand=demand,
        capacity=capacity,
    )


_SIZES_PER_E = 20.0  # kernels of one name within 5 % count as equal


def _distinct_kernels(program: RoleProgram) -> tuple[np.ndarray, list[Kernel]]:
    """Row per record, and kernel per row; they are told apart by their op, and by their time up to a few per cent:
    where a script really ran, one kernel's name stands for many sizes."""
    of_record = np.zeros(program.n, np.int64)
    records = np.flatnonzero(program.action == RUN)
    size = np.rint(np.log(np.maximum(program.run_us[records], 1e-3)) * _SIZES_PER_E).astype(np.int64)
    keys = np.stack([program.program.op[records], size], axis=1)
    distinct, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    of_record[records] = inverse.reshape(-1)
    kernels = []
    for op, i in zip(distinct[:, 0].tolist(), first.tolist()):
        signature = program.ops[op] if op >= 0 else OpSignature("")
        kernels.append(Kernel(signature, float(program.run_us[records[i]])))
    return of_record, kernels


def _overlap_tables(world: World, partition: Partition, costs: Costs, overlap: Overlap | None, kernels: list):
    if overlap is None:
        none = np.zeros(1)
        return np.zeros(len(partition.representative), np.int64), none, none, none
    asked: dict[tuple[int, int], int] = {}
    kernel_numbers: dict[Kernel, int] = {}  # pairs are looked up by numbers: signatures are slow to hash
    call_numbers: dict[PairCall, int] = {}
    nothing = -1  # an uneven all-to-all: how long it takes alone is not known
    placed: dict[tuple, int] = {}
    table0 = np.zeros(len(partition.representative), np.int64)
    rows: list[int] = []
    for c, rank in enumerate(partition.representative.tolist()):
        role = int(world.role_of[rank])
        program = world.programs[role]
        place_of: dict[int, int] = {}
        answers = [None if uneven(x) else cost_of(world, costs, rank, x, place_of) for x in program.calls]
        same = (role, *map(id, answers))
        if same in placed:
            table0[c] = placed[same]
            continue
        table0[c] = placed[same] = len(rows)
        beside = [
            nothing if cost is None else _numbered(call_numbers, _beside(world, program, x, cost, costs))
            for x, cost in zip(program.calls, answers)
        ]
        for kernel in kernels[role][1]:
            number = _numbered(kernel_numbers, kernel)
            rows += [nothing if b == nothing else asked.setdefault((number, b), len(asked)) for b in beside]
    factors = np.ones((len(asked) + 1, 3))  # the last for nothing
    if asked:
        of_kernels, of_calls = list(kernel_numbers), list(call_numbers)
        factors[:-1] = overlap.slowdowns([(of_kernels[k], of_calls[b]) for k, b in asked])
    factors = np.maximum(factors, 1.0)[np.asarray(rows or [nothing])] - 1.0
    return table0, *(np.ascontiguousarray(factors[:, i]) for i in range(3))


def _numbered(numbers: dict, key: Any) -> int:
    return numbers.setdefault(key, len(numbers))


def _beside(world: World, program: RoleProgram, call: Call, cost: Any, costs: Costs) -> PairCall:
    size = world.groups[program.ports[call.port].group].size if call.kind == Kind.COLLECTIVE else 2
    return PairCall(
        name=call.name,
        bytes=call.total_bytes,
        run_us=cost.duration_us,
        channels=int(getattr(cost, "channels", 0)),
        ranks=size,
        ranks_per_node=min(size, costs.accelerators_per_node),
        algorithm=str(getattr(cost, "algorithm", "")),
        protocol=str(getattr(cost, "protocol", "")),
    )


def _loads(world: World, partition: Partition, tables: Tables, links: Links | None):
    """Loads of the channels' calls on one resource of each colour."""
    calls = int(tables.channels.calls.sum())
    nothing = np.zeros(0, np.int64)
    if links is None or not len(links.owner):
        return np.zeros(calls, np.int64), np.zeros(2, np.int64), nothing, np.zeros(0), np.zeros(0)
    channel_of_owner = _channels_of_owners(world, partition, tables, links)
    kept = np.isin(links.resource, partition.resources)
    resource = np.searchsorted(partition.resources, links.resource[kept])
    channel, call, demand = channel_of_owner[links.owner[kept]], links.call[kept], links.demand[kept]
    capacity = links.capacity[partition.resources].copy()
    np.maximum.at(capacity, resource, demand)  # a call alone runs at its own pace, whatever the numbers say

    # Sum what concrete groups of one channel bring to the resource.
    key = np.stack([channel, call, resource], axis=1)
    key, inverse = np.unique(key, axis=0, return_inverse=True)
    demand = np.bincount(inverse.reshape(-1), weights=demand)
    # The most that can come together: one call of each channel.
    most: dict[tuple[int, int], float] = {}
    for (ch, _, r), d in zip(key.tolist(), demand.tolist()):
        most[ch, r] = max(most.get((ch, r), 0.0), d)
    together = np.zeros(len(capacity))
    for (_, r), d in most.items():
        together[r] += d
    scarce = together > capacity * (1 + 1e-9)
    keep = scarce[key[:, 2]]
    key, demand = key[keep], demand[keep]

    row_of: dict[tuple[int, int], int] = {}
    start = [0, 0]  # row 0 loads nothing
    for ch, number, _ in key.tolist():
        if (ch, number) not in row_of:
            row_of[ch, number] = len(row_of) + 1
            start.append(start[-1])
        start[-1] += 1
    row = np.zeros(calls, np.int64)
    for ch, ends in enumerate(tables.ends):
        c, port = ends[0]
        role = int(tables.classes.role[c])
        first = int(tables.channels.first0[ch])
        for i, made in enumerate(calls_of_port(world, int(world.port_base[role]) + port)):
            row[first + i] = row_of.get((ch, links.number(made)), 0)
    return row, np.asarray(start, np.int64), np.ascontiguousarray(key[:, 2]), demand, capacity


def _channels_of_owners(world: World, partition: Partition, tables: Tables, links: Links) -> np.ndarray:
    of_colour: dict[int, int] = {}
    for ch, ends in enumerate(tables.ends):
        c, port = ends[0]
        rank = int(partition.representative[c])
        if world.programs[world.role_of[rank]].ports[port].kind == Kind.COLLECTIVE:
            of_colour[partition.colour_of_group[world.group_of(rank, port)]] = ch
    groups = [of_colour[partition.colour_of_group[g]] for g in links.groups]
    classes = partition.class_of[links.senders[:, 0]]
    senders = tables.classes.channel[tables.classes.port0[classes] + links.senders[:, 1]]
    return np.concatenate([np.asarray(groups, np.int64), senders])
