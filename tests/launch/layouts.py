"""Group tables and rank programs as Megatron-like layouts give them: tensor fastest, then data, then pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.memory import MEMORY_COLUMNS
from echo_hooks.graph.ops import OpSignature, TensorMeta
from echo_hooks.graph.program import Kind
from echo_hooks.graph.recorder import Recorder
from echo_hooks.graph.rundir import RankTrace


@dataclass(frozen=True)
class Layout:
    """``special``: rank -> size of an extra op that only it runs. ``root_op``: first of each TP group does more.

    ``embedding``: groups of first and last stage. ``world_p2p``: stages talk on the world group. ``local_sync``: a
    rank's table has only its own groups. ``asks``: rank -> donor of a value it made up.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    embedding: bool = False
    world_p2p: bool = False
    local_sync: bool = False
    root_op: bool = False
    integers: bool = False
    special: dict[str, int] = field(default_factory=dict)
    asks: dict[str, int] = field(default_factory=dict)

    @property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.pp)

    def rank(self, t: int, d: int, p: int) -> int:
        return t + self.tp * (d + self.dp * p)

    def places(self, rank: int) -> tuple[int, int, int]:
        return rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp)

    def families(self) -> list[tuple[str, list[tuple[int, ...]]]]:
        tp, dp, pp = range(self.tp), range(self.dp), range(self.pp)
        found = [("world", [tuple(range(self.world_size))])]
        if self.tp > 1:
            found.append(("tp", [tuple(self.rank(t, d, p) for t in tp) for p in pp for d in dp]))
        if self.dp > 1:
            found.append(("dp", [tuple(self.rank(t, d, p) for d in dp) for p in pp for t in tp]))
        if self.pp > 1:
            found.append(("pp", [tuple(self.rank(t, d, p) for p in pp) for d in dp for t in tp]))
        if self.ep > 1:
            blocks = range(0, self.world_size, self.ep)
            found.append(("ep", [tuple(range(b, b + self.ep)) for b in blocks]))
        if self.embedding:
            last = self.pp - 1
            found.append(("embd", [(self.rank(t, d, 0), self.rank(t, d, last)) for d in dp for t in tp]))
        return found


def table_of(layout: Layout, rank: int | None = None) -> GroupTable:
    table = GroupTable()
    for name, groups in layout.families():
        for ranks in groups:
            if not layout.local_sync or rank is None or rank in ranks:
                table.add(ranks, desc=name, name=name, site=f"layout.py:{name}")
    return table


def trace_of(rank: int, layout: Layout, steps: int = 1) -> RankTrace:
    """One step: forward with a TP all-reduce, sends and receives along the pipeline, gradients over DP."""
    clock = iter(range(0, 10**12, 1000 + rank))  # host times differ from rank to rank
    recorder = Recorder(rank, layout.world_size, clock_ns=lambda: next(clock), groups=table_of(layout, rank))
    t, d, p = layout.places(rank)
    groups = {name: recorder.groups.of_rank(family, rank) for family, name in _family_names(recorder.groups)}
    meta = (TensorMeta((4, 4), "bfloat16"),)

    def talk(kind: Kind, name: str, group: str, peer: int = -1, dtype: str = "bfloat16") -> None:
        found = groups[group]
        seq = recorder.next_seq(found.index) if kind == Kind.COLLECTIVE else -1
        recorder.communication(
            kind,
            OpSignature(name, meta, meta),
            group=found.index,
            bytes=32,
            dtype=dtype,
            seq=seq,
            peer=peer,
            site="train.py:9",
        )

    talk(Kind.COLLECTIVE, "broadcast", "world", peer=0)
    if steps:
        recorder.mark("step_begin", 1)
        recorder.compute(recorder.ops.add(OpSignature("aten.mm.default", meta * 2, meta)))
        if layout.tp > 1:
            talk(Kind.COLLECTIVE, "broadcast", "tp", peer=groups["tp"].ranks[0])
            talk(Kind.COLLECTIVE, "all_reduce", "tp")
        if layout.root_op and t == 0:
            recorder.copy(recorder.ops.add(OpSignature("aten.copy_.default", meta, meta)), 32)
        if str(rank) in layout.special:
            shape = (TensorMeta((layout.special[str(rank)],), "float32"),)
            recorder.compute(recorder.ops.add(OpSignature("aten.sum.default", shape, shape)))
        if layout.ep > 1:
            talk(Kind.COLLECTIVE, "all_to_all", "ep")
        if layout.pp > 1:
            lane = "world" if layout.world_p2p else "pp"
            dtype = "int64" if layout.integers else "bfloat16"
            if p > 0:
                talk(Kind.RECV, "recv", lane, layout.rank(t, d, p - 1), dtype)
            if p < layout.pp - 1:
                talk(Kind.SEND, "send", lane, layout.rank(t, d, p + 1), dtype)
        if layout.embedding and groups["embd"] is not None:
            talk(Kind.COLLECTIVE, "all_reduce", "embd")
        if layout.dp > 1:
            talk(Kind.COLLECTIVE, "all_reduce", "dp")
        recorder.mark("step_end", 1)
    if str(rank) in layout.asks:
        donor = layout.asks[str(rank)]
        recorder.assume(f"broadcast of int64 from rank {donor}", "as this rank's own", site="train.py:3")
        recorder.unanswered.add(donor)
    program = recorder.program.program()
    begin = int(np.argmax(program.kind == Kind.MARK)) if steps else len(program)
    return RankTrace(
        rank=rank,
        program=program.slice(begin, len(program)),
        prologue=program.slice(0, begin),
        ops=list(recorder.ops.signatures),
        groups=recorder.groups,
        memory_events={name: np.zeros(0, dtype) for name, dtype in MEMORY_COLUMNS.items()},
        assumptions=list(recorder.assumptions.values()),
        steps=steps,
        trace_seconds=0.01,
        unanswered=sorted(recorder.unanswered),
    )


def _family_names(groups: GroupTable) -> list[tuple[int, str]]:
    return [(number, family[0].name) for number, family in enumerate(groups.families())]
