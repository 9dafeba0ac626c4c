"""A run of two ranks, small enough to work out by hand.

Global clock in us (rank 1's own clock starts 5 us later; tests use both):

    rank 0  compute  10-110 mm, 110-310 mm backward, 400-450 adam       send 110-150 (moves from 130)
            all-reduce of dp 200-400 (moves from 260)                   host busy 0-10 and 450-460
    rank 1  recv 15-150 (moves from 130), mm 150-210, mm backward 210-260, all-reduce 260-400, adam 400-450
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from echo_hooks.compose.result import Breakdown, Composition, Timeline
from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.memory import HOLDERS, MemoryEvents
from echo_hooks.graph.ops import OpSignature, OpTable, TensorMeta
from echo_hooks.graph.program import Evidence, Kind, Phase, ProgramBuilder
from echo_hooks.graph.recorder import Assumption
from echo_hooks.graph.roles import MemorySummary, Role
from echo_hooks.graph.rundir import RankTrace, Run, write_groups, write_manifest, write_roles, write_trace
from echo_hooks.report.files import write_files
from echo_hooks.report.report import build_report

MIB = 1 << 20
NAN = float("nan")
MATRIX = TensorMeta((1000, 1000), "bfloat16")
WIDE = TensorMeta((1000, 2000), "bfloat16")


def groups() -> GroupTable:
    table = GroupTable()
    table.add((0, 1), name="world")
    table.add((0, 1), name="pp", site="train.py:10")
    table.add((0, 1), name="dp", site="train.py:11")
    return table


def trace(rank: int) -> RankTrace:
    ops, builder = OpTable(), ProgramBuilder()
    forward = ops.add(OpSignature("aten.mm.default", (MATRIX, MATRIX), (MATRIX,), flops=2 * 10**9))
    backward = ops.add(OpSignature("aten.mm.default", (MATRIX, WIDE), (WIDE,), flops=4 * 10**9))
    adam = ops.add(OpSignature("aten._fused_adamw_.default", (TensorMeta((1000,), "float32"),)))
    begin, end = ops.add(OpSignature("step_begin")), ops.add(OpSignature("step_end"))
    pp, dp = builder.new_stream("comm:pp"), builder.new_stream("comm:dp")
    bf16, mlp, site = builder.string("bfloat16"), builder.string("layers.3.mlp"), builder.string("train.py:42")

    def compute(op, phase):
        label = 0 if op == adam else mlp
        builder.append(Kind.COMPUTE, op=op, host_us=10.0, phase=phase, module=label, evidence=Evidence.MODELLED)

    def p2p(kind, name):
        common = {"group": 1, "bytes": 2 * MIB, "dtype": bf16, "peer": 1 - rank, "site": site, "stream": pp}
        builder.append(kind, op=ops.add(OpSignature(name)), host_us=10.0, microbatch=0, **common)

    builder.append(Kind.MARK, op=begin, seq=7)
    if rank == 0:
        compute(forward, Phase.FORWARD)
        p2p(Kind.SEND, "send")
    else:
        p2p(Kind.RECV, "recv")
        compute(forward, Phase.FORWARD)
    compute(backward, Phase.BACKWARD)
    reduce = ops.add(OpSignature("all_reduce", attrs=(("reduce", "sum"),)))
    builder.append(
        Kind.COLLECTIVE, op=reduce, host_us=10.0, group=2, seq=0, bytes=14 * MIB, dtype=bf16, site=site, stream=dp
    )
    compute(adam, Phase.OPTIMIZER)
    builder.append(Kind.SYNC, host_us=10.0)
    builder.append(Kind.MARK, op=end, seq=7, host_us=10.0 if rank == 0 else 15.0)

    memory = MemoryEvents()
    memory.append(0, 0, 40 * MIB, 0, HOLDERS.index("parameters"), mlp, Phase.OTHER)
    memory.append(1, 1, 20 * MIB, 0, HOLDERS.index("activations"), mlp, Phase.FORWARD)
    memory.append(3, 2, 10 * MIB, 0, HOLDERS.index("gradients"), mlp, Phase.BACKWARD)
    memory.append(4, 1, -20 * MIB, 0, HOLDERS.index("activations"), mlp, Phase.BACKWARD)
    program = builder.program()
    return RankTrace(
        rank=rank,
        program=program,
        prologue=program.slice(0, 0),
        ops=ops.signatures,
        groups=groups(),
        memory_events=memory.columns(),
        memory=memory_summary(rank),
        assumptions=[Assumption("item of unknown float", "1.0", "train.py:50", 3)] if rank == 0 else [],
        notes=["the tokenizer was read from the cache"],
        steps=1,
        trace_seconds=1.5,
    )


def memory_summary(rank: int) -> MemorySummary:
    return MemorySummary(
        peak_allocated_bytes=70 * MIB,
        peak_reserved_bytes=(80 + 60 * rank) * MIB,
        held_at_peak={"parameters": 40 * MIB, "activations": 20 * MIB, "gradients": 10 * MIB},
        peak_by_phase={"forward": 60 * MIB, "backward": 70 * MIB},
        extra={"context": 10 * MIB},
    )


def roles() -> list[Role]:
    return [
        Role("stage 0", 0, (0,), (0,), "traced", memory_summary(0)),
        Role("stage 1", 1, (1,), (1,), "traced", memory_summary(1)),
    ]


@pytest.fixture
def run(tmp_path) -> Run:
    traces = {rank: trace(rank) for rank in (0, 1)}
    manifest = {"format": 1, "script": "train.py", "world_size": 2, "tokens_per_step": 4600}
    return Run(tmp_path / "run", manifest, groups(), roles(), traces)


@pytest.fixture
def composition(run) -> Composition:
    columns = {
        0: {
            "issue_us": [0, 10, 20, 30, 40, 50, 60, 460],
            "start_us": [NAN, 10, 110, 110, 200, 400, NAN, NAN],
            "ready_us": [NAN, NAN, 130, NAN, 260, NAN, NAN, NAN],
            "end_us": [NAN, 110, 150, 310, 400, 450, NAN, NAN],
        },
        1: {
            "issue_us": [0, 10, 20, 30, 40, 50, 60, 460],
            "start_us": [NAN, 10, 145, 205, 255, 395, NAN, NAN],
            "ready_us": [NAN, 125, NAN, NAN, 255, NAN, NAN, NAN],
            "end_us": [NAN, 145, 205, 255, 395, 445, NAN, NAN],
        },
    }
    breakdowns = {
        0: Breakdown(460.0, 350.0, {"pp": 0.0, "dp": 90.0}, 0.0, 0.0, 20.0, {"pp": 20.0, "dp": 140.0}),
        1: Breakdown(460.0, 160.0, {"pp": 20.0, "dp": 140.0}, 115.0, 0.0, 25.0, {"pp": 20.0, "dp": 140.0}),
    }
    timelines = [
        Timeline(
            representative=rank,
            offset_us=5.0 * rank,
            ranks=(rank,),
            role=f"stage {rank}",
            program=run.traces[rank].program,
            slowdown=np.where(np.isfinite(columns[rank]["start_us"]), 1.0, NAN),
            breakdown=breakdowns[rank],
            calls=np.flatnonzero(np.isfinite(columns[rank]["ready_us"])),
            calls_ready_us=np.array([t for t in columns[rank]["ready_us"] if t == t]),
            **{n: np.array(v, dtype=float) for n, v in columns[rank].items() if n != "ready_us"},
        )
        for rank in (0, 1)
    ]
    return Composition(460.0, timelines, critical=0, evidence={"modelled": 0.9, "measured": 0.1}, seconds=0.25)


@pytest.fixture
def cluster():
    accelerator = SimpleNamespace(
        name="tiny", product="Tiny 1", memory_bytes=128 * MIB, peak_flops={"bfloat16": 1e15, "float32": 1e14}
    )
    return SimpleNamespace(
        name="tiny:1x2", accelerator=accelerator, nodes=1, accelerators_per_node=2, host_memory_bytes=None
    )


@pytest.fixture
def run_directory(run):
    """The run on disk, as a launcher leaves it before composing."""
    write_groups(run.path, run.groups)
    write_roles(run.path, run.roles)
    for rank_trace in run.traces.values():
        write_trace(run.path, rank_trace)
    write_manifest(run.path, {k: v for k, v in run.manifest.items() if k != "format"})
    return run.path


@pytest.fixture
def saved(run_directory, run, composition, cluster):
    """The run with its report."""
    write_files(run_directory, run, composition, build_report(run, composition, cluster, timings={}))
    return run_directory
