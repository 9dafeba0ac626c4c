"""Times every collective over sizes through torch.distributed, as CSV that ``echo-sim calibrate`` reads.

    torchrun --nproc-per-node 8 bench/gpu/nccl_sweep.py --out sweep.csv
    torchrun --nproc-per-node 8 bench/gpu/nccl_sweep.py --out ll128.csv --tag LL128     (with NCCL_PROTO=LL128 set)

On CUDA one call at a time under the profiler: the time is that of the NCCL kernel, per call the least over ranks,
because who arrives last does not wait; then the median over calls. On CPU (gloo) it is wall time, good only for trying
the script out. ``bytes`` as nccl-tests counts them; ``exchange``: each of two ranks sends and receives that much.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "exchange", "send")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="CSV to write (by rank 0)")
    parser.add_argument("--collectives", default=",".join(COLLECTIVES))
    parser.add_argument("--min-bytes", type=int, default=1 << 10)
    parser.add_argument("--max-bytes", type=int, default=1 << 32)
    parser.add_argument("--calls", type=int, default=10, help="timed calls per size")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tag", default="default", help="names the run, for instance after the protocol forced")
    options = parser.parse_args()
    unknown = set(options.collectives.split(",")) - set(COLLECTIVES)
    if unknown:
        parser.error(f"unknown collective {unknown.pop()!r}; known: {', '.join(COLLECTIVES)}")
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if cuda else "gloo")
    rows = [row for name in options.collectives.split(",") for row in sweep(name, options, cuda)]
    if dist.get_rank() == 0:
        write(options.out, rows, cuda)
    dist.destroy_process_group()


def sizes(least: int, most: int) -> list[int]:
    """Powers of two and one and a half times them."""
    every = [size for k in range(40) for size in (1 << k, 3 << k >> 1)]
    return sorted({size for size in every if least <= size <= most})


def sweep(name: str, options: argparse.Namespace, cuda: bool) -> list[dict[str, object]]:
    dtype = getattr(torch, options.dtype)
    world, rows = dist.get_world_size(), []
    unit = world * dtype.itemsize
    for size in sizes(options.min_bytes, options.max_bytes):
        if size % unit:
            continue
        call = make_call(name, size, dtype, "cuda" if cuda else "cpu")
        if call is None:
            return []
        times = kernel_us(call, options) if cuda else wall_us(call, options)
        everyones: list[list[float]] = [[] for _ in range(world)]
        dist.all_gather_object(everyones, times)
        taking_part = [t for t in everyones if t]
        per_call = [min(call_times) for call_times in zip(*taking_part)]
        rows.append(
            {
                "tag": options.tag,
                "collective": name,
                "ranks": 2 if name in ("exchange", "send") else world,
                "nodes": world // int(os.environ.get("LOCAL_WORLD_SIZE", world)),
                "dtype": options.dtype,
                "bytes": size,
                "time": statistics.median(per_call),
            }
        )
    return rows


def make_call(name: str, size: int, dtype: torch.dtype, device: str) -> Callable[[], None] | None:
    """One collective of ``size`` bytes, None where the world or the backend cannot run it."""
    rank, world, count = dist.get_rank(), dist.get_world_size(), size // dtype.itemsize
    whole = torch.zeros(count, dtype=dtype, device=device)
    part = torch.zeros(count // world, dtype=dtype, device=device)
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if name == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part)
    if name == "reduce_scatter":
        return (lambda: dist.reduce_scatter_tensor(part, whole)) if device == "cuda" else None
    if name == "broadcast":
        return lambda: dist.broadcast(whole, 0)
    if name == "reduce":
        return lambda: dist.reduce(whole, 0)
    if name == "all_to_all":
        other = torch.empty_like(whole)
        return (lambda: dist.all_to_all_single(other, whole)) if device == "cuda" else None
    if world != 2:
        return None
    if name == "send":
        return (lambda: dist.send(whole, 1)) if rank == 0 else (lambda: dist.recv(whole, 0))
    there, back = torch.zeros_like(whole), torch.zeros_like(whole)

    def exchange() -> None:
        ops = [dist.P2POp(dist.isend, there, 1 - rank), dist.P2POp(dist.irecv, back, 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return exchange


def wall_us(call: Callable[[], None], options: argparse.Namespace) -> list[float]:
    for _ in range(options.warmup):
        call()
    times = []
    for _ in range(options.calls):
        dist.barrier()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return times


def kernel_us(call: Callable[[], None], options: argparse.Namespace) -> list[float]:
    from torch.profiler import ProfilerActivity, profile

    for _ in range(options.warmup):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(options.calls):
            dist.barrier()  # itself a kernel: an all-reduce, which comes before each call
            torch.cuda.synchronize()
            call()
            torch.cuda.synchronize()
    kernels = sorted(
        (event for event in profiler.events() if event.name.startswith("ncclDevKernel")),
        key=lambda event: event.time_range.start,
    )
    return [event.time_range.elapsed_us() for event in kernels[1::2]]


def write(path: str, rows: list[dict[str, object]], cuda: bool) -> None:
    """The column says which clock it was: kernel_us or time_us."""
    version = ".".join(map(str, torch.cuda.nccl.version())) if cuda else ""
    extra = {"gpu": torch.cuda.get_device_name() if cuda else "cpu", "nccl_version": version}
    with open(path, "w", newline="", encoding="utf-8") as file:
        columns = ["tag", "collective", "ranks", "nodes", "dtype", "bytes", "kernel_us" if cuda else "time_us", *extra]
        writer = csv.writer(file)
        writer.writerow(columns)
        for row in rows:
            writer.writerow([*row.values(), *extra.values()])


if __name__ == "__main__":
    main()
