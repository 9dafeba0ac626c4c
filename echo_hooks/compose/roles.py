"""Roles from traces: which ranks run equal programs, proven by tracing or assumed from where they sit in the groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from echo_hooks.compose.symmetry import Axis, Tree, grow, nearest
from echo_hooks.errors import UsageError
from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.merge import family_ordinals
from echo_hooks.graph.ops import OpSignature
from echo_hooks.graph.problems import rank_ranges
from echo_hooks.graph.program import DEFAULT_STREAM, HOST_STREAM, Kind, Program
from echo_hooks.graph.recorder import Assumption
from echo_hooks.graph.roles import MemorySummary, Role
from echo_hooks.graph.rundir import RankTrace


def assign_roles(
    traces: Mapping[int, RankTrace], groups: GroupTable, world_size: int, nproc_per_node: int = 0
) -> list[Role]:
    """A role for every rank of the world. ``groups``: the merged table, which the traces use (see merge_groups).

    Raises UsageError naming the ranks that no traced rank can stand for.
    """
    facts = {rank: rank_facts(trace) for rank, trace in traces.items()}
    return roles_from_facts(facts, groups, world_size, nproc_per_node)


# ---- what is kept of a trace ----


@dataclass(frozen=True)
class RankFacts:
    """What schedule and roles need of one trace, small enough to keep for every rank of a large job.

    ``point_to_point``: indices of groups on which the rank sends or receives. ``roots``: (group, root's global rank) of
    its rooted collectives. ``hands_on``: it sends or receives whole numbers, which a later rank's script may act on.
    ``unanswered``: as in RankTrace. ``nothing``: why the rank has no measured step, "" when it has.
    """

    rank: int
    signature: bytes
    point_to_point: frozenset[int] = frozenset()
    roots: frozenset[tuple[int, int]] = frozenset()
    hands_on: bool = False
    memory: MemorySummary = field(default_factory=MemorySummary)
    assumptions: tuple[Assumption, ...] = ()
    unanswered: frozenset[int] = frozenset()
    nothing: str = ""


def rank_facts(trace: RankTrace, nothing: str = "") -> RankFacts:
    """What is kept of a trace. ``nothing``: why it has no measured step."""
    point_to_point: set[int] = set()
    roots: set[tuple[int, int]] = set()
    hands_on = False
    for part in (trace.prologue, trace.program):
        sends = (part.kind == Kind.SEND) | (part.kind == Kind.RECV)
        point_to_point.update(np.unique(part.group[sends & (part.group >= 0)]).tolist())
        rooted = (part.kind == Kind.COLLECTIVE) & (part.group >= 0) & (part.peer >= 0)
        roots.update(zip(part.group[rooted].tolist(), part.peer[rooted].tolist()))
        hands_on |= any(_whole_numbers(part.strings[i]) for i in np.unique(part.dtype[sends]))
    return RankFacts(
        trace.rank,
        program_signature(trace),
        frozenset(point_to_point),
        frozenset(roots),
        hands_on,
        trace.memory,
        tuple(trace.assumptions),
        frozenset(trace.unanswered),
        nothing,
    )


def _whole_numbers(dtype: str) -> bool:
    return dtype.startswith(("int", "uint", "bool"))


# ---- equal programs ----


def program_signature(trace: RankTrace) -> bytes:
    """16 bytes, equal for ranks whose programs are equal once groups and peers are named by place, not by number.

    Counts: the groups made in calls that all ranks must make alike;
    order, kinds, ops with their shapes, bytes, streams, events, threads, batches, the family and size of each
    group, and the *place* of roots and peers in it. Of the prologue only communication counts, and of its ops the
    names: nothing there is timed. Does not count: host times, labels (module, phase, micro-batch, site), tags of
    device communication (NCCL has none), and the rank's own place in its groups.
    """
    digest = blake2b(str(trace.steps).encode(), digest_size=16)
    for group in trace.created:
        digest.update(repr(trace.groups[group].ranks).encode())
    ops = np.array([_number(_op_text(op)) for op in trace.ops] + [0], np.int64)  # op -1 finds the appended 0
    # The root of a scatter holds a list that the others do not: before the steps that makes no difference.
    names = np.array([_number(op.name) for op in trace.ops] + [0], np.int64)
    families = family_ordinals(trace.groups)
    groups = [_number(f"{families[g.family]!r} {g.size}") for g in trace.groups]
    group_numbers = np.array([*groups, 0], np.int64)
    prologue = trace.prologue
    talks = np.isin(prologue.kind, (Kind.COLLECTIVE, Kind.SEND, Kind.RECV))
    before = Program({k: v[talks] for k, v in prologue.columns.items()}, prologue.strings, prologue.streams)
    for part, timed in ((before, False), (trace.program, True)):
        for column in _canonical(part, ops if timed else names, group_numbers, trace.groups, timed):
            digest.update(np.ascontiguousarray(column, np.dtype("<i8")).tobytes())
    return digest.digest()


def _canonical(program: Program, ops: np.ndarray, group_numbers: np.ndarray, groups: GroupTable, timed: bool):
    """The columns that make programs different, free of numbers that depend on the rank."""
    yield np.array([len(program)])
    yield program.kind
    yield ops[program.op]
    yield group_numbers[program.group]
    yield _relative(program.seq, program.group)
    yield program.bytes
    yield np.array([_number(s) for s in program.strings], np.int64)[program.dtype]
    yield _peer_places(program, groups)
    yield np.where(program.stream == HOST_STREAM, program.tag, -1)
    yield _first_use(program.batch)
    if timed:
        yield np.where(program.stream == DEFAULT_STREAM, -2, _first_use(program.stream))
        yield _first_use(program.event)
        yield _first_use(program.thread)


def _number(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _op_text(op: OpSignature) -> str:
    return repr((op.name, op.inputs, op.outputs, op.flops, op.bytes_read, op.bytes_written, op.attrs))


def _first_use(column: np.ndarray) -> np.ndarray:
    """Numbers replaced by the order of their first appearance; negative ones stay."""
    _, first, inverse = np.unique(column, return_index=True, return_inverse=True)
    order = np.empty(len(first), np.int64)
    order[np.argsort(first, kind="stable")] = np.arange(len(first))
    return np.where(column < 0, column, order[inverse])


def _relative(seq: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Running numbers counted from the first one of each group: set-up may have used some on one rank only."""
    result = seq.astype(np.int64)
    counted = np.flatnonzero((group >= 0) & (seq >= 0))
    if len(counted):
        _, first, inverse = np.unique(group[counted], return_index=True, return_inverse=True)
        result[counted] -= result[counted][first][inverse]
    return result


def _peer_places(program: Program, groups: GroupTable) -> np.ndarray:
    places = np.full(len(program), -1, np.int64)
    named = np.flatnonzero((program.peer >= 0) & (program.group >= 0))
    if len(named):
        pairs = program.group[named].astype(np.int64) << 32 | program.peer[named]
        distinct, inverse = np.unique(pairs, return_inverse=True)
        values = [_place(groups, int(pair >> 32), int(pair & 0xFFFFFFFF)) for pair in distinct]
        places[named] = np.array(values, np.int64)[inverse]
    return places


def _place(groups: GroupTable, group: int, peer: int) -> int:
    ranks = groups[group].ranks
    return ranks.index(peer) if peer in ranks else -2 - peer  # a peer outside the group: the script's own mistake


# ---- classes: ranks that may be equal ----


@dataclass(frozen=True)
class RankClass:
    """Ranks that the groups cannot tell apart. ``places``: (family name, place) in each point-to-point family."""

    ranks: tuple[int, ...]
    places: tuple[tuple[str, int], ...] = ()


def point_to_point_families(facts: Mapping[int, RankFacts], groups: GroupTable) -> set[int]:
    """Families of groups on which traced ranks send to each other."""
    return {groups[i].family for fact in facts.values() for i in fact.point_to_point}


def rank_classes(world_size: int, groups: GroupTable, positional: set[int]) -> list[RankClass]:
    """Classes in order of their lowest rank.

    Ranks are in one class when they are members of the same families, in groups of the same size, and in the families
    ``positional`` (where ranks send to each other) at the same place: a role names its peers by place.
    """
    columns = [np.zeros(world_size, np.int64)]
    shown: list[tuple[str, np.ndarray]] = []
    for number, family in enumerate(groups.families()):
        column = np.full(world_size, -1, np.int64)
        places = np.full(world_size, -1, np.int64)
        for group in family:
            members = np.asarray(group.ranks)
            places[members] = np.arange(group.size)
            column[members] = group.size << 32
        if number in positional:
            column = np.where(places < 0, -1, column | places)
            shown.append((family[0].name, places))
        if (column != column[0]).any():
            columns.append(column)
    _, inverse = np.unique(np.stack(columns), axis=1, return_inverse=True)
    inverse = inverse.reshape(-1)  # numpy 2.0 alone answers with one more dimension
    order = np.argsort(inverse, kind="stable")
    by_class = np.split(order, np.cumsum(np.bincount(inverse))[:-1])
    classes = [
        RankClass(
            tuple(ranks.tolist()),
            tuple((name, int(places[ranks[0]])) for name, places in shown if places[ranks[0]] >= 0),
        )
        for ranks in by_class
    ]
    return sorted(classes, key=lambda c: c.ranks[0])


def rank_axes(world_size: int, groups: GroupTable, nproc_per_node: int) -> list[Axis]:
    """The numbers by which programs of one class could still differ: place in each family, on the node, in the world.

    Shortest first: a difference that two axes explain is put down to the one with fewer places. Equal axes are one.
    """
    candidates = []
    for family in groups.families():
        places = np.full(world_size, -1, np.int64)
        for group in family:
            places[np.asarray(group.ranks)] = np.arange(group.size)
        candidates.append(Axis(family[0].name, places))
    every = np.arange(world_size)
    if 1 < nproc_per_node < world_size:
        candidates.append(Axis("local rank", every % nproc_per_node))
        candidates.append(Axis("node", every // nproc_per_node))
    candidates.append(Axis("rank", every))
    seen: dict[bytes, Axis] = {}
    for axis in candidates:
        if axis.places.max(initial=-1) > 0:
            seen.setdefault(axis.places.tobytes(), axis)
    return sorted(seen.values(), key=lambda axis: int(axis.places.max()))


def class_trees(
    facts: Mapping[int, RankFacts], classes: Sequence[RankClass], axes: Sequence[Axis]
) -> list[Tree | None]:
    """For each class what its traced ranks say about the others; None when none is traced."""
    trees: list[Tree | None] = []
    for rank_class in classes:
        signatures = {rank: facts[rank].signature for rank in rank_class.ranks if rank in facts}
        trees.append(grow(rank_class.ranks, signatures, axes) if signatures else None)
    return trees


# ---- roles ----


def roles_from_facts(
    facts: Mapping[int, RankFacts], groups: GroupTable, world_size: int, nproc_per_node: int = 0
) -> list[Role]:
    """As `assign_roles`; the facts' groups are indices of ``groups``."""
    classes = rank_classes(world_size, groups, point_to_point_families(facts, groups))
    trees = class_trees(facts, classes, rank_axes(world_size, groups, nproc_per_node))
    missing = [rank_class for rank_class, tree in zip(classes, trees) if tree is None]
    if missing:
        ranks = rank_ranges(r for c in missing for r in c.ranks)
        one_each = rank_ranges(c.ranks[0] for c in missing)
        raise UsageError(
            f"no traced rank can stand for rank(s) {ranks}, which are in other groups or at other places in them: "
            f"trace at least {one_each} too (--trace-ranks)"
        )
    members: dict[bytes, list[int]] = {}
    reasons: dict[bytes, set[str]] = {}
    for rank_class, tree in zip(classes, trees):
        assert tree is not None
        for rank in rank_class.ranks:
            if rank in facts:
                members.setdefault(facts[rank].signature, []).append(rank)
                continue
            stands_for, doubt = nearest(tree, rank)
            signature = facts[stands_for].signature
            members.setdefault(signature, []).append(rank)
            reasons.setdefault(signature, set()).add(_why(rank_class, doubt))
    places = {rank: c.places for c in classes for rank in c.ranks}
    roles = []
    for signature, like in members.items():
        proven = tuple(sorted(rank for rank in like if rank in facts))
        name = _name(places[proven[0]], len(members))
        why = "; ".join(sorted(reasons.get(signature, {"every rank was traced"})))
        roles.append(Role(name, proven[0], tuple(sorted(like)), proven, why, facts[proven[0]].memory))
    roles.sort(key=lambda role: role.ranks[0])
    return _distinct_names(roles)


def _why(rank_class: RankClass, doubt: str) -> str:
    if doubt:
        return doubt
    if rank_class.places:
        return "same place in " + ", ".join(dict.fromkeys(name for name, _ in rank_class.places)) + ", same groups"
    return "members of the same groups, collectives only"


def _name(places: tuple[tuple[str, int], ...], roles: int) -> str:
    if places:
        return " ".join(f"{name}{place}" for name, place in dict(places).items())
    return "all" if roles == 1 else "ranks"


def _distinct_names(roles: list[Role]) -> list[Role]:
    count: dict[str, int] = {}
    for role in roles:
        count[role.name] = count.get(role.name, 0) + 1
    for role in roles:
        if count[role.name] > 1 or role.name == "ranks":
            prefix = "" if role.name == "ranks" else f"{role.name} "
            role.name = f"{prefix}rank {role.traced_rank}" + ("" if len(role.ranks) == 1 else " and like")
    return roles
