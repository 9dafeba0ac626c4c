"""Times every collective over sizes through torch.distributed, as CSV that ``echo-sim calibrate`` reads.

    torchrun --nproc-per-node 8 bench/gpu/nccl_sweep.py --out sweep.csv
    torchrun --nproc-per-node 8 bench/gpu/nccl_sweep.py --out sweep.csv --protocols default,LL,LL128,Simple

On CUDA the time is that of the NCCL kernel, from the profiler. A wait on the device and an all-reduce of four bytes
are queued before each call, so that the ranks start it together. What counts is the least over the ranks that
receive data, because who arrives last does not wait; then the median over calls. ``rank_least_us`` and
``rank_most_us`` are the medians of the least and the most over all ranks. On CPU (gloo) it is wall time, good only for
trying the script out (``--quick``). ``bytes`` as nccl-tests counts them; ``exchange``: each of two ranks sends and
receives that much; ``send``: from the first of two ranks to the second.

With NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS=INIT,TUNING and NCCL_DEBUG_FILE set, NCCL's own log says what it ran.
What fails is said on stderr and left out; the file holds what was measured up to then.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "exchange", "send")
_RULED = COLLECTIVES[:5]  # the others are sends, for which NCCL_PROTO says nothing
_OF_TWO = ("exchange", "send")
COLUMNS = (
    "tag", "collective", "ranks", "nodes", "dtype", "bytes", "time", "calls", "rank_least_us", "rank_most_us",
    "gpu", "nccl_version", "environment", "torch",
)  # fmt: skip
_SLEEP_CYCLES = 800_000  # 0.4 ms at 2 GHz: longer than the host takes to queue a call under the profiler


@dataclass(frozen=True)
class Group:
    """``world``: ranks that take part, the first of all; ``nccl``: its process group; ``cuda``: else gloo."""

    world: int
    nccl: Any
    cuda: bool


def main() -> None:
    options = arguments()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    started = time.monotonic()
    with Table(options.out) as table:
        for protocol in options.protocols:
            for world in options.ranks or [dist.get_world_size()]:
                sweep_all(protocol, world, options, table, cuda, started)
    if dist.get_rank() == 0:
        describe(options.out, cuda)
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="CSV to write (by rank 0)")
    parser.add_argument("--collectives", type=words, default=list(COLLECTIVES))
    parser.add_argument("--protocols", type=words, default=["default"], help="default, LL, LL128, Simple")
    parser.add_argument("--ranks", type=lambda text: [int(w) for w in words(text)], help="group sizes, such as 2,4,8")
    parser.add_argument("--min-bytes", type=int, default=1 << 10)
    parser.add_argument("--max-bytes", type=int, default=1 << 30)
    parser.add_argument("--calls", type=int, default=10, help="timed calls per size")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=480, help="start no further sweep after so long")
    parser.add_argument("--quick", action="store_true", help="a few small sizes, to try it out")
    options = parser.parse_args()
    for given, known in ((options.collectives, COLLECTIVES), (options.protocols, ("default", "LL", "LL128", "Simple"))):
        for name in given:
            if name not in known:
                parser.error(f"unknown {name!r}; known: {', '.join(known)}")
    if options.quick:
        options.max_bytes, options.calls, options.warmup = min(options.max_bytes, 8 * options.min_bytes), 3, 1
    return options


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def sweep_all(protocol: str, world: int, options: argparse.Namespace, table: Table, cuda: bool, started: float) -> None:
    """Every collective with one protocol on one group, whose communicator is new so that it reads the variable."""
    kept = os.environ.get("NCCL_PROTO")
    if protocol != "default":
        os.environ["NCCL_PROTO"] = protocol
    try:
        members = list(range(world))
        group = Group(world, dist.new_group(members, backend="nccl" if cuda else "gloo"), cuda)
        for name in options.collectives:
            if (protocol != "default" and name not in _RULED) or (name in _OF_TWO and world != 2):
                continue
            # Rank 0 decides for all, whose clocks differ.
            go = [time.monotonic() - started < options.seconds]
            dist.broadcast_object_list(go, 0)
            if not go[0]:
                say(f"{name}, {protocol}: left out after {options.seconds:g} s")
                continue
            tag = protocol if options.ranks is None else f"{protocol} on {world}"
            table.add(sweep(name, tag, group, options))
    finally:
        if protocol != "default":
            os.environ.pop("NCCL_PROTO")
            if kept is not None:
                os.environ["NCCL_PROTO"] = kept


def sweep(name: str, tag: str, group: Group, options: argparse.Namespace) -> list[dict[str, object]]:
    dtype = getattr(torch, options.dtype)
    unit = group.world * dtype.itemsize
    chosen = sorted({size // unit * unit for size in sizes(options.min_bytes, options.max_bytes) if size >= unit})
    times, failure = None, ""
    if dist.get_rank() < group.world:
        try:
            times = (kernel_us if group.cuda else wall_us)(name, chosen, dtype, group, options)
        except (RuntimeError, ValueError) as error:
            failure = f"{type(error).__name__}: {error}".splitlines()[0]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (times, failure))
    failures = [failure for _, failure in everyones if failure]
    if failures:
        say(f"{name}, {tag}: left out: {failures[0]}")
        return []
    by_rank = [times for times, _ in everyones[: group.world]]
    local = int(os.environ.get("LOCAL_WORLD_SIZE", group.world))
    rows = []
    for i, size in enumerate(chosen):
        per_call = list(zip(*(times[i] for times in by_rank)))
        counted = [[call[r] for r in receivers(name, group.world)] for call in per_call]
        rows.append(
            {
                "tag": tag,
                "collective": name,
                "ranks": group.world,
                "nodes": max(1, group.world // local),
                "dtype": options.dtype,
                "bytes": size,
                "time": round(statistics.median(min(call) for call in counted), 3),
                "calls": len(per_call),
                "rank_least_us": round(statistics.median(min(call) for call in per_call), 3),
                "rank_most_us": round(statistics.median(max(call) for call in per_call), 3),
            }
        )
    say(f"{name}, {tag}: {len(rows)} sizes")
    return rows


def receivers(name: str, world: int) -> Iterable[int]:
    """Places of the ranks that are done only when data has come: a sender may be done once it has handed it on."""
    if name == "reduce":
        return (0,)
    return range(1, world) if name in ("broadcast", "send") else range(world)


def sizes(least: int, most: int) -> list[int]:
    """Powers of two and one and a half times them."""
    every = [size for k in range(40) for size in (1 << k, 3 << k >> 1)]
    return sorted({size for size in every if least <= size <= most})


def make_call(name: str, size: int, dtype: torch.dtype, group: Group) -> Callable[[], object]:
    """One collective of ``size`` bytes."""
    pg, rank, world, count = group.nccl, dist.get_rank(), group.world, size // dtype.itemsize
    device = "cuda" if group.cuda else "cpu"
    whole = torch.zeros(count, dtype=dtype, device=device)
    part = torch.zeros(count // world, dtype=dtype, device=device)
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole, group=pg)
    if name == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=pg)
    if name == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=pg)
    if name == "broadcast":
        return lambda: dist.broadcast(whole, 0, group=pg)
    if name == "reduce":
        return lambda: dist.reduce(whole, 0, group=pg)
    other = torch.zeros_like(whole)
    if name == "all_to_all":
        return lambda: dist.all_to_all_single(other, whole, group=pg)
    if name == "send":
        return (lambda: dist.send(whole, 1, group=pg)) if rank == 0 else (lambda: dist.recv(whole, 0, group=pg))

    def exchange() -> None:
        ops = [dist.P2POp(dist.isend, whole, 1 - rank, pg), dist.P2POp(dist.irecv, other, 1 - rank, pg)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return exchange


def wall_us(
    name: str, chosen: list[int], dtype: torch.dtype, group: Group, options: argparse.Namespace
) -> list[list[float]]:
    """By size and call."""
    result = []
    for size in chosen:
        call, times = make_call(name, size, dtype, group), []
        for i in range(options.warmup + options.calls):
            dist.barrier(group=group.nccl)
            start = time.perf_counter()
            call()
            if i >= options.warmup:
                times.append((time.perf_counter() - start) * 1e6)
        result.append(times)
    return result


def kernel_us(
    name: str, chosen: list[int], dtype: torch.dtype, group: Group, options: argparse.Namespace
) -> list[list[float]]:
    """By size and call, all under one profiler. Every call has two NCCL kernels, the first of which is the
    all-reduce that lines the ranks up."""
    from torch.profiler import ProfilerActivity, profile

    line_up = torch.zeros(1, device="cuda")
    each = options.warmup + options.calls
    make_call(name, chosen[0], dtype, group)()  # connects
    dist.all_reduce(line_up, group=group.nccl)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for size in chosen:
            call = make_call(name, size, dtype, group)
            for _ in range(each):
                torch.cuda._sleep(_SLEEP_CYCLES)
                dist.all_reduce(line_up, group=group.nccl)
                call()
                torch.cuda.synchronize()
            del call
    kernels = sorted(
        (event for event in profiler.events() if event.name.startswith(("ncclDevKernel", "ncclKernel"))),
        key=lambda event: event.time_range.start,
    )
    return by_size([event.time_range.elapsed_us() for event in kernels], len(chosen), each, options.warmup)


def by_size(durations: list[float], count: int, each: int, warmup: int) -> list[list[float]]:
    """Of kernels in order of their start: those of the calls themselves, by size, without the warm-up.

    Raises ValueError where their number is not two per call.
    """
    if len(durations) != 2 * count * each:
        raise ValueError(f"the profiler saw {len(durations)} NCCL kernels instead of {2 * count * each}")
    calls = durations[1::2]
    return [calls[i * each + warmup : (i + 1) * each] for i in range(count)]


class Table:
    """The CSV, written by rank 0 as it goes. The column of times says which clock it was: kernel_us or time_us."""

    def __init__(self, path: str):
        self._file = open(path, "w", newline="", encoding="utf-8") if dist.get_rank() == 0 else None  # noqa: SIM115
        cuda = torch.cuda.is_available()
        self._about: dict[str, object] = {
            "gpu": torch.cuda.get_device_name() if cuda else "cpu",
            "nccl_version": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "",
            "torch": torch.__version__,
        }
        if self._file:
            clock = "kernel_us" if cuda else "time_us"
            csv.writer(self._file).writerow(clock if column == "time" else column for column in COLUMNS)

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()

    def add(self, rows: list[dict[str, object]]) -> None:
        if self._file:
            for row in rows:
                whole = {**row, **self._about, "environment": environment()}
                csv.writer(self._file).writerow(whole[column] for column in COLUMNS)
            self._file.flush()


def environment() -> str:
    """NCCL_* variables that it runs with, as NAME=VALUE joined by semicolons."""
    debug = ("NCCL_DEBUG", "NCCL_VERSION")
    said = (f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("NCCL_") and not k.startswith(debug))
    return ";".join(said)


def describe(path: str, cuda: bool) -> None:
    """How the accelerators are linked, beside the CSV."""
    if not cuda:
        return
    try:
        said = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        said = f"nvidia-smi: {error}\n"
    with open(path + ".topology.txt", "w", encoding="utf-8") as file:
        file.write(said)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
