"""Measured steps played again: profiler traces of all ranks imported as programs and composed.

    python bench/replay_traces.py TRACES [--out bench/results/replay_h200x2.json]

TRACES: a directory of NAME.rankR.json.gz, all ranks of each run. Kernels take their measured durations, hosts their
measured gaps; a collective or send takes the mean, over its calls of one size, of the least duration over the ranks
(the last to arrive does not wait). What the composer has to get right is order: streams, waits, who waits for whom.

The measured step is the job's: from when the last rank ended the step before to when the last rank ended this one (the
ranks of a run are on one host's clock). Single ranks may take longer in one step, having ended the one before early.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from echo_hooks.compose import compose
from echo_hooks.graph.kineto import MeasuredRank, read_kineto
from echo_hooks.graph.merge import merge_groups
from echo_hooks.graph.program import Kind
from echo_hooks.graph.roles import Role


@dataclass(frozen=True)
class MeasuredCost:
    duration_us: float
    latency_us: float = 0.0
    evidence: str = "measured"
    loads: tuple = ()


class MeasuredNetwork:
    """Answers with the means of what the traces hold."""

    def __init__(self, ranks: dict[int, MeasuredRank]):
        calls: dict[tuple, list[float]] = {}  # one call -> durations on its ranks
        for rank, measured in ranks.items():
            p, ops = measured.trace.program, measured.trace.ops
            number: dict[tuple, int] = defaultdict(int)
            for i in np.flatnonzero(np.isin(p.kind, (Kind.COLLECTIVE, Kind.SEND, Kind.RECV))).tolist():
                ends = tuple(measured.trace.groups[int(p.group[i])].ranks)
                name = ops[int(p.op[i])].name
                if p.kind[i] != Kind.COLLECTIVE:
                    ends = (rank, int(p.peer[i])) if p.kind[i] == Kind.SEND else (int(p.peer[i]), rank)
                    name = "send"
                where = (int(p.group[i]), ends, p.kind[i] == Kind.COLLECTIVE)
                key = (name, ends, int(p.bytes[i]), where, number[where])
                number[where] += 1
                calls.setdefault(key, []).append(float(p.duration_us[i]))
        by_size: dict[tuple, list[float]] = defaultdict(list)
        for (name, ends, size, _, _), durations in calls.items():
            by_size[name, ends, size].append(min(durations))
        self.means = {key: float(np.mean(least)) for key, least in by_size.items()}

    def collective(self, name, ranks, bytes, dtype, *, root=-1, count=1, splits=None):
        return MeasuredCost(self.means[name, ranks, bytes])

    def point_to_point(self, source, destination, bytes, *, group_size):
        return MeasuredCost(self.means["send", (source, destination), bytes])


def replay(files: dict[int, Path]) -> dict:
    began = time.perf_counter()
    ranks = {rank: read_kineto(path, rank) for rank, path in sorted(files.items())}
    read = time.perf_counter()
    groups = merge_groups([measured.trace for measured in ranks.values()])
    roles = [Role(f"rank {rank}", rank, (rank,), (rank,)) for rank in ranks]
    traces = {rank: measured.trace for rank, measured in ranks.items()}
    result = compose(len(ranks), groups, roles, traces, MeasuredNetwork(ranks), accelerators_per_node=8, repeat=4)
    assert not result.problems, result.problems
    begin, end = (max(getattr(m, edge) for m in ranks.values()) for edge in ("begin_us", "end_us"))
    measured_us = (end - begin) / next(iter(traces.values())).steps
    return {
        "measured_ms": round(measured_us / 1e3, 3),
        "measured_ms_by_rank": [round(measured.step_us / 1e3, 3) for measured in ranks.values()],
        "composed_ms": round(result.step_time_us / 1e3, 3),
        "error": round(result.step_time_us / measured_us - 1, 4),
        "records": sum(len(trace.program) for trace in traces.values()),
        "inferred_waits": sum(measured.inferred_waits for measured in ranks.values()),
        "read_s": round(read - began, 2),
        "compose_s": round(time.perf_counter() - read, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    files: dict[str, dict[int, Path]] = defaultdict(dict)
    for path in sorted(options.traces.iterdir()):
        if found := re.fullmatch(r"(.+)\.rank(\d+)\.json(?:\.gz)?", path.name):
            files[found[1]][int(found[2])] = path
    rows = []
    for name, of_rank in files.items():
        row = {"run": name, **replay(of_rank)}
        rows.append(row)
        print("{run:12} measured {measured_ms:9.3f} ms, composed {composed_ms:9.3f} ms, {error:+.2%}".format(**row))
    if options.out:
        made_by = {
            "command": f"python bench/replay_traces.py TRACES --out {options.out}",
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "python": sys.version.split()[0],
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({**made_by, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
