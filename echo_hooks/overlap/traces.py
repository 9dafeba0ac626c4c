"""Pairs in a profiled run: kernels that ran with and without a collective beside them, from Kineto traces.

A kernel is known by its symbol, launch geometry and op; its time alone is the median of the runs that no communication
touched, its time beside a call the median of the runs that one call covered from begin to end. What the trace cannot
tell: how long a call takes alone (the least of equal calls stands for it: the one that waited least), and its own
slowdown. Shapes and FLOPs are there when the run was profiled with ``record_shapes``.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from echo_hooks.errors import UsageError
from echo_hooks.graph.chrome_trace import chrome_events
from echo_hooks.graph.kineto import COLLECTIVES, DTYPES
from echo_hooks.graph.ops import OpSignature, TensorMeta
from echo_hooks.overlap.samples import Launch, Sample

MAX_EVENTS = 20_000_000
LEAST_RUNS = 3
"""Runs of a kernel, alone and covered each, for a median worth the name."""

_SCALAR_TYPES = {"float": "float32", "c10::BFloat16": "bfloat16", "c10::Half": "float16", "double": "float64",
                 "long int": "int64", "int": "int32", "bool": "bool", "unsigned char": "uint8"}  # fmt: skip
_ITEMSIZE = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}


@dataclass
class Pairs:
    """``samples`` found; ``runs_partly_covered``: kernel runs that a call covered only in part or several together,
    which count for nothing; ``kernels_alone_only``: kernels that no call covered often enough."""

    samples: list[Sample] = field(default_factory=list)
    runs_partly_covered: int = 0
    kernels_alone_only: int = 0


@dataclass(frozen=True)
class _Call:
    begin_us: float
    end_us: float
    name: str
    bytes: int
    dtype: str
    ranks: int
    channels: int
    threads: int


def pairs_in(path: Path, accelerator: str, *, ranks_per_node: int) -> Pairs:
    """Samples of one rank's trace (.json or .json.gz).

    Raises UsageError for a file that is no trace, or holds no kernels.
    """
    kernels, calls, ops = _read(path)
    calls.sort(key=lambda call: call.begin_us)
    alone: dict[tuple, list[float]] = defaultdict(list)
    covered: dict[tuple, dict[tuple, list[float]]] = defaultdict(lambda: defaultdict(list))
    least: dict[tuple, float] = {}
    for call in calls:
        key = _kind(call)
        least[key] = min(least.get(key, math.inf), call.end_us - call.begin_us)
    found = Pairs()
    begins = [call.begin_us for call in calls]
    longest = max((call.end_us - call.begin_us for call in calls), default=0.0)
    for begin, end, name, launch, external in kernels:
        first = bisect.bisect_left(begins, begin - longest)
        beside = [c for c in calls[first : bisect.bisect_right(begins, end)] if c.end_us > begin and c.begin_us < end]
        key = (name, launch, ops.get(external, OpSignature("")))
        if not beside:
            alone[key].append(end - begin)
        elif len(beside) == 1 and beside[0].begin_us <= begin and beside[0].end_us >= end:
            covered[key][_kind(beside[0])].append(end - begin)
        else:
            found.runs_partly_covered += 1
    for key, times in alone.items():
        enough = {kind: runs for kind, runs in covered.get(key, {}).items() if len(runs) >= LEAST_RUNS}
        if len(times) < LEAST_RUNS or not enough:
            found.kernels_alone_only += 1
            continue
        name, launch, signature = key
        for kind, runs in enough.items():
            call_name, size, dtype, ranks, channels, threads = kind
            found.samples.append(
                Sample(
                    kernel=f"{signature.name or 'kernel'} {name} {launch.blocks}x{launch.threads}",
                    signature=signature,
                    launch=launch,
                    call=call_name,
                    bytes=size,
                    dtype=dtype,
                    ranks=ranks,
                    ranks_per_node=min(ranks, ranks_per_node),
                    rank=-1,
                    repeat=0,
                    base_us=median(times),
                    overlap_us=median(runs),
                    call_base_us=least[kind],
                    call_overlap_us=math.nan,
                    channels=channels,
                    threads=threads,
                    accelerator=accelerator,
                    source="trace",
                )
            )
    return found


def launch_of(args: dict[str, Any], kernels: int = 1) -> Launch:
    """Geometry from the arguments of a kernel's event in a Kineto trace; 0 for what it does not say."""
    counts = []
    for key in ("grid", "block"):
        extents = args.get(key)
        if not isinstance(extents, list) or not extents or not all(isinstance(n, int) for n in extents):
            extents = [0]
        counts.append(math.prod(extents))
    registers, shared = args.get("registers per thread"), args.get("shared memory")
    plain = [value if isinstance(value, int) else 0 for value in (registers, shared)]
    return Launch(counts[0], counts[1], plain[0], plain[1], kernels)


def _kind(call: _Call) -> tuple:
    return (call.name, call.bytes, call.dtype, call.ranks, call.channels, call.threads)


def _read(path: Path):
    kernels: list[tuple[float, float, str, Launch, Any]] = []
    calls: list[_Call] = []
    ops: dict[Any, OpSignature] = {}
    kept = 0
    for event in chrome_events(path):
        category, args, name = event.get("cat"), event.get("args"), event.get("name")
        if category not in ("kernel", "cpu_op") or not isinstance(args, dict) or not isinstance(name, str):
            continue
        kept += 1
        if kept > MAX_EVENTS:
            raise UsageError(f"{path}: more than {MAX_EVENTS} events; profile fewer steps")
        external = args.get("External id")
        if category == "cpu_op":
            if isinstance(external, int) and name.startswith("aten::"):
                ops[external] = _signature(name, args)
            continue
        begin, length = event.get("ts"), event.get("dur")
        if not isinstance(begin, (int, float)) or not isinstance(length, (int, float)) or not 0 <= length < math.inf:
            raise UsageError(f"{path}: the kernel {name[:60]!r} has no time")
        if name.startswith("nccl"):
            calls.append(_call(begin, begin + length, args))
        elif length > 0:
            kernels.append((begin, begin + length, name.split("(")[0][:120], launch_of(args), external))
    if not kernels:
        raise UsageError(f"{path}: no kernel in it; profile with ProfilerActivity.CUDA")
    return kernels, calls, ops


def _call(begin: float, end: float, args: dict[str, Any]) -> _Call:
    launch = launch_of(args)
    dtype, width = DTYPES.get(str(args.get("dtype")), ("", 1))
    elements = max(
        (n for n in (args.get("In msg nelems"), args.get("Out msg nelems")) if isinstance(n, int)), default=0
    )
    name = COLLECTIVES.get(str(args.get("Collective name")), "send")
    ranks = args.get("Group size")
    ranks = ranks if isinstance(ranks, int) and ranks > 0 else 2
    return _Call(begin, end, name, elements * width, dtype, ranks, launch.blocks, launch.threads)


def _signature(name: str, args: dict[str, Any]) -> OpSignature:
    dims, types = args.get("Input Dims"), args.get("Input type")
    inputs = []
    for shape, kind in zip(dims if isinstance(dims, list) else (), types if isinstance(types, list) else ()):
        dtype = _SCALAR_TYPES.get(str(kind))
        if dtype and isinstance(shape, list) and shape and all(isinstance(n, int) for n in shape):
            inputs.append(TensorMeta(tuple(shape), dtype))
    read = sum(math.prod(t.shape) * _ITEMSIZE.get(t.dtype, 1) for t in inputs)
    flops = 0
    if name in ("aten::mm", "aten::addmm") and len(inputs) >= 2:
        a, b = inputs[-2], inputs[-1]
        flops = 2 * math.prod(a.shape) * b.shape[-1]
    written = max((math.prod(t.shape) * _ITEMSIZE.get(t.dtype, 1) for t in inputs), default=0) if not flops else 0
    if flops:
        written = inputs[-2].shape[0] * inputs[-1].shape[-1] * _ITEMSIZE.get(inputs[-1].dtype, 1)
    return OpSignature(name.replace("::", "."), tuple(inputs), (), flops, read, written)


__all__ = ["Pairs", "launch_of", "pairs_in"]
