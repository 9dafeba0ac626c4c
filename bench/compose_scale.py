"""How composing scales: a GPT of 175 billion parameters with TP 8, PP 16 and 1F1B, on 128 to 131,072 ranks.

    python bench/compose_scale.py [--ranks 128,1024,8192,131072] [--unfolded 128,1024] [--shared 8192,131072]
        [--micro-batches 64] [--out bench/results/compose_scale.json]

Prints a table of ranks, classes, records simulated, seconds, processor seconds (which other work on the machine does
not stretch) and records per processor second, and the peak memory of the process so far. The programs are made up (96
layers of 12,288, sequence 2,048, kernels at round durations); only their size and shape matter here. ``--shared``:
folded, on Echo's network model of H100 nodes, operations sharing the links that they load; the other rows have a
network that answers at once, to time the composer alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from echo_hooks.compose import compose
from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.ops import OpSignature, OpTable
from echo_hooks.graph.program import COLUMNS, DEFAULTS, Evidence, Kind, Program
from echo_hooks.graph.roles import Role
from echo_hooks.graph.rundir import RankTrace
from echo_hooks.hardware.cluster import load_cluster
from echo_hooks.network.model import CommunicationModel

FOLDED, SHARED, UNFOLDED = "folded", "shared links", "every rank"
TP, PP, LAYERS = 8, 16, 96
ACTIVATION_BYTES = 2048 * 12288 * 2
FORWARD_KERNELS, BACKWARD_KERNELS = 30, 52  # per layer; what Megatron launches without fusion, about

Rows = list[dict]


def kernel(op: int, us: float) -> dict:
    return {"kind": Kind.COMPUTE, "op": op, "duration_us": us, "evidence": Evidence.MODELLED, "host_us": 4.0}


def collective(op: int, group: int, bytes: int, stream: int = 0) -> dict:
    return {
        "kind": Kind.COLLECTIVE,
        "op": op,
        "group": group,
        "bytes": bytes,
        "dtype": 1,
        "host_us": 8.0,
        "stream": stream,
    }


def layer(ops: dict[str, int], tp: int, kernels: int) -> Rows:
    half = kernels // 2
    rows = [kernel(ops["mm"], 20.0 + i % 7 * 15.0) for i in range(half)]
    rows.append(collective(ops["all_reduce"], tp, ACTIVATION_BYTES))
    rows += [kernel(ops["mm"], 25.0 + i % 5 * 15.0) for i in range(kernels - half)]
    rows.append(collective(ops["all_reduce"], tp, ACTIVATION_BYTES))
    return rows


def exchange(ops: dict[str, int], group: int, parts: list[tuple[Kind, int]], batch: int) -> Rows:
    return [
        {
            "kind": kind,
            "op": ops["send" if kind == Kind.SEND else "recv"],
            "group": group,
            "bytes": ACTIVATION_BYTES,
            "dtype": 1,
            "peer": peer,
            "batch": batch,
            "host_us": 8.0,
            "stream": 1,
        }
        for kind, peer in parts
    ]


def stage_program(
    stage: int, micro: int, groups: dict[str, int], peers: tuple[int, ...], ops: dict[str, int]
) -> Program:
    """1F1B on one rank of a pipeline stage; p2p on a stream of its own, ordered by events, host blocked as Megatron's
    ``p2p_communication`` does for neither (overlap off, no synchronisation)."""
    forward = layer(ops, groups["tp"], FORWARD_KERNELS) * (LAYERS // PP)
    backward = layer(ops, groups["tp"], BACKWARD_KERNELS) * (LAYERS // PP)
    rows: Rows = [{"kind": Kind.MARK, "op": ops["step_begin"]}]
    batch = event = 0

    def talk(parts: list[tuple[Kind, int]]) -> None:
        nonlocal batch, event
        if not parts:
            return
        rows.append({"kind": Kind.RECORD_EVENT, "event": event})
        rows.append({"kind": Kind.WAIT_EVENT, "event": event, "stream": 1})
        rows.extend(exchange(ops, groups["pp"], parts, batch))
        rows.append({"kind": Kind.RECORD_EVENT, "event": event + 1, "stream": 1})
        rows.append({"kind": Kind.WAIT_EVENT, "event": event + 1})
        batch, event = batch + 1, event + 2

    first, last = stage == 0, stage == PP - 1
    before, after = [] if first else [peers[stage - 1]], [] if last else [peers[stage + 1]]
    warm = min(PP - 1 - stage, micro)
    for _ in range(warm):
        talk([(Kind.RECV, p) for p in before])
        rows.extend(forward)
        talk([(Kind.SEND, p) for p in after])
    if warm < micro:
        talk([(Kind.RECV, p) for p in before])
    for i in range(micro - warm):
        rows.extend(forward)
        talk([(Kind.SEND, p) for p in after] + [(Kind.RECV, p) for p in after])
        rows.extend(backward)
        more = i < micro - warm - 1
        talk([(Kind.SEND, p) for p in before] + ([(Kind.RECV, p) for p in before] if more else []))
    for _ in range(warm):
        talk([(Kind.RECV, p) for p in after])
        rows.extend(backward)
        talk([(Kind.SEND, p) for p in before])
    rows.append(collective(ops["reduce_scatter"], groups["dp"], 4 * 175_000_000_000 // TP // PP))
    rows += [kernel(ops["adam"], 900.0) for _ in range(12)]
    rows.append(collective(ops["all_gather"], groups["dp"], 2 * 175_000_000_000 // TP // PP))
    rows += [{"kind": Kind.SYNC, "host_us": 10.0}, {"kind": Kind.MARK, "op": ops["step_end"]}]
    columns: dict[str, np.ndarray] = {
        name: np.asarray([row.get(name, DEFAULTS.get(name)) for row in rows], dtype=dtype)
        for name, dtype in COLUMNS.items()
    }
    return Program(columns, ["", "bfloat16"], ["default", "p2p"])


def plan(ranks: int, micro: int) -> tuple[GroupTable, list[Role], dict[int, RankTrace]]:
    """Ranks in Megatron's order: TP innermost, then DP, then PP."""
    dp = ranks // (TP * PP)
    groups = GroupTable()
    groups.add(tuple(range(ranks)), name="world", site="init")
    number: dict[tuple[str, int], int] = {}
    for name, starts, stride, size in (
        ("tp", range(0, ranks, TP), 1, TP),
        ("dp", (s * TP * dp + t for s in range(PP) for t in range(TP)), TP, dp),
        ("pp", range(TP * dp), TP * dp, PP),
    ):
        for start in starts:
            made = groups.add(tuple(start + stride * i for i in range(size)), name=name, site=name, desc=name)
            number[name, start] = made.index
    table = OpTable()
    names = {"mm": "aten.mm.default", "adam": "aten._fused_adamw_.default"}
    names |= {n: n for n in ("all_reduce", "reduce_scatter", "all_gather", "send", "recv", "step_begin", "step_end")}
    ops = {short: table.add(OpSignature(name)) for short, name in names.items()}
    roles, traces = [], {}
    for stage in range(PP):
        traced = stage * TP * dp
        own = {"tp": number["tp", traced], "dp": number["dp", traced], "pp": number["pp", 0]}
        program = stage_program(stage, micro, own, groups[own["pp"]].ranks, ops)
        members = tuple(range(traced, traced + TP * dp))
        roles.append(Role(f"stage {stage}", traced, members, (traced,)))
        traces[traced] = RankTrace(traced, program, program.slice(0, 0), table.signatures, groups, {})
    return groups, roles, traces


@dataclass(frozen=True)
class RoundCost:
    duration_us: float


class RoundNetwork:
    """20 us and 300 GB/s within a node, 40 us and 40 GB/s between nodes: asking it costs nothing."""

    def collective(self, name, ranks, bytes, dtype, *, root=-1, count=1, splits=None):
        return self._cost(len({rank // 8 for rank in ranks}) > 1, bytes)

    def point_to_point(self, source, destination, bytes, *, group_size):
        return self._cost(source // 8 != destination // 8, bytes)

    def _cost(self, between: bool, bytes: int) -> RoundCost:
        return RoundCost(40 + bytes / 40e3 if between else 20 + bytes / 300e3)


def measure(ranks: int, micro: int, mode: str) -> dict:
    groups, roles, traces = plan(ranks, micro)
    network = CommunicationModel(load_cluster(f"h100-sxm:{ranks // 8}x8")) if mode == SHARED else RoundNetwork()
    began, cpu_began = time.perf_counter(), time.process_time()
    result = compose(ranks, groups, roles, traces, network, accelerators_per_node=8, folded=mode != UNFOLDED)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    assert not result.problems, result.problems
    records = 2 * sum(len(t.program) for t in result.timelines)
    return {
        "ranks": ranks,
        "mode": mode,
        "classes": len(result.timelines),
        "records": records,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds, 2),
        "records_per_cpu_s": round(records / cpu_seconds),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "step_ms": round(result.step_time_us / 1e3, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="128,1024,8192,131072", help="folded")
    parser.add_argument("--shared", default="128,1024,8192,131072", help="folded, with shared links")
    parser.add_argument("--unfolded", default="128,1024")
    parser.add_argument("--micro-batches", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    for mode in (FOLDED, SHARED):
        measure(128, 2, mode)  # compile
    rows = []
    print("   ranks             mode  classes       records  seconds    CPU s  M rec/CPU s  peak GiB  step, ms")
    # By memory, so that each row's peak is its own.
    for mode, wanted in ((FOLDED, options.ranks), (SHARED, options.shared), (UNFOLDED, options.unfolded)):
        for ranks in filter(None, wanted.split(",")):
            row = measure(int(ranks), options.micro_batches, mode)
            rows.append(row)
            print(
                "{ranks:>8,} {mode:>16} {classes:>8,} {records:>13,} {seconds:>8.2f} {cpu_seconds:>8.2f}".format(**row),
                f"{row['records_per_cpu_s'] / 1e6:>12.2f} {row['peak_gib']:>9.2f} {row['step_ms']:>9.1f}",
                flush=True,
            )
    if options.out:
        made_by = {
            "command": f"python bench/compose_scale.py --out {options.out}",
            "machine": f"{_processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end",
            "python": sys.version.split()[0],
            "micro_batches": options.micro_batches,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({**made_by, "rows": rows}, indent=1) + "\n")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
