"""`echo-sim overlap collect`: every kernel beside every call, on all local GPUs with real collectives, or on one with
a stand-in for them; only what ran wholly beside the other counts."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echo_hooks.errors import UsageError
from echo_hooks.graph.ops import OpSignature
from echo_hooks.overlap.collection.cuda import CudaTrials
from echo_hooks.overlap.collection.kernels import kernels, signature_of
from echo_hooks.overlap.collection.measure import Ranks, Trials, measure_pair, measure_waiting, time_call, time_kernel
from echo_hooks.overlap.collection.trials import Stamps, mean_of_calls
from echo_hooks.overlap.samples import UNKNOWN, Launch, Sample, write_samples

CALLS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "exchange")
WAITING = ("all_reduce", "exchange")


@dataclass(frozen=True)
class Plan:
    """What is collected. ``ranks``: of each communication. ``seconds``: no new kernel is begun after so long (0: no
    limit)."""

    out: Path
    accelerator: str
    kernels: tuple[str, ...]
    ranks: int = 2
    calls: tuple[str, ...] = CALLS
    sizes: tuple[int, ...] = (8 << 20, 64 << 20, 512 << 20)
    repeats: int = 3
    seconds: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Call:
    """One communication to be measured: ``run`` issues it. ``us``: alone. ``refresh``: makes its data random again."""

    name: str
    bytes: int
    run: Callable[[], Any]
    us: float
    launch: Launch = UNKNOWN
    algorithm: str = ""
    protocol: str = ""
    refresh: Callable[[], Any] = lambda: None


@dataclass
class Counts:
    """What was not kept, for the file and the terminal."""

    kernels: int = 0
    pairs: int = 0
    repeats_dropped: int = 0
    kernel_runs_kept: int = 0
    kernel_runs_dropped: int = 0
    left_out: dict[str, str] = field(default_factory=dict)


def kernel_names(only: str | None) -> tuple[str, ...]:
    """All kernels, or those whose names begin with one of a comma-separated list; UsageError when none does."""
    every = tuple(kernels())
    if not only:
        return every
    wanted = tuple(word.strip() for word in only.split(","))
    found = tuple(name for name in every if name.startswith(wanted))
    if not found:
        raise UsageError(f"--kernels {only}: no kernel begins so; known: {', '.join(every)}")
    return found


def collect(plan: Plan) -> None:
    """Measure on ``plan.ranks`` local GPUs, one process each; rank 0 writes ``plan.out``.

    Raises UsageError where there are fewer than two GPUs.
    """
    devices, there = plan.ranks, torch.cuda.device_count()
    if devices < 2 or there < devices:
        raise UsageError(
            f"collecting takes at least 2 local GPUs and {devices} were asked for, this machine has {there}; on one"
            " GPU --emulate measures against a stand-in for the collectives"
        )
    with tempfile.TemporaryDirectory(prefix="echo-overlap-") as directory:
        torch.multiprocessing.spawn(_rank_main, (devices, f"file://{directory}/store", plan), nprocs=devices)


def _rank_main(rank: int, size: int, store: str, plan: Plan) -> None:
    os.environ.setdefault("LOCAL_RANK", str(rank))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine, whatever its name resolves to
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=size, device_id=torch.device("cuda", rank))
    ranks = _Ranks(dist.new_group(backend="gloo"))
    torch.manual_seed(plan.seed + rank)
    trials = CudaTrials(torch.device("cuda", rank))
    makers = {(name, bytes): collective(name, bytes, trials.device) for name in plan.calls for bytes in plan.sizes}
    shapes = trials.launches([(f"{name}:{bytes}", run) for (name, bytes), (run, _) in makers.items()])
    calls = [
        Call(name, bytes, run, time_call(trials, ranks, run), shapes.get(f"{name}:{bytes}", UNKNOWN), refresh=refresh)
        for (name, bytes), (run, refresh) in makers.items()
    ]
    version = ".".join(map(str, torch.cuda.nccl.version()))
    measure_all(plan, trials, ranks, calls, about={"communication": f"NCCL {version}"})
    dist.destroy_process_group()


class _Ranks:
    """Ranks over a gloo group, so that no kernel of theirs runs on the device."""

    def __init__(self, group: Any):
        self._group = group
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def largest(self, values: tuple[float, ...]) -> tuple[float, ...]:
        mine = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._group)
        return tuple(mine.tolist())

    def together(self) -> None:
        dist.barrier(group=self._group)

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found


class Alone:
    """The only rank there is."""

    rank, size = 0, 1

    def largest(self, values: tuple[float, ...]) -> tuple[float, ...]:
        return values

    def together(self) -> None:
        pass

    def gather(self, value: Any) -> list[Any]:
        return [value]


def collective(name: str, size: int, device: torch.device) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """One collective of ``size`` bytes (as nccl-tests counts them) in bfloat16 on random data: the call, and what
    makes its data random again (sums in place grow twofold with every call)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    count = size // 2 // world * world
    whole = torch.empty(count, device=device, dtype=torch.bfloat16)

    def refresh() -> None:
        whole.normal_().mul_(2.0**-100)

    refresh()
    part = whole[: count // world].clone()
    other = torch.empty_like(whole) if name in ("all_to_all", "exchange") else part

    def exchange() -> None:
        """To the next rank, from the one before: for two ranks both ways at once."""
        ops = [
            dist.P2POp(dist.isend, whole, (rank + 1) % world),
            dist.P2POp(dist.irecv, other, (rank - 1) % world),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    known: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "exchange": exchange,
    }
    if name not in known:
        raise UsageError(f"unknown communication {name!r}; known: {', '.join(known)}")
    return known[name], refresh


def emulate(plan: Plan, traffics: Sequence[tuple[str, int, Any, str, str]]) -> None:
    """Measure on this machine's one GPU beside stand-ins: (call, bytes, Traffic, algorithm, protocol) each.

    Raises UsageError where there is no GPU.
    """
    from echo_hooks.overlap.collection.stand_in import THREADS, StandIn

    if not torch.cuda.is_available():
        raise UsageError("--emulate runs on a GPU, and this machine has none that torch can use")
    torch.cuda.set_device(0)
    torch.manual_seed(plan.seed)
    trials, alone = CudaTrials(torch.device("cuda", 0)), Alone()
    stand_in = StandIn(trials.device, max(t.bytes for _, _, t, _, _ in traffics), max(t[2].channels for t in traffics))
    calls = []
    for name, bytes, traffic, algorithm, protocol in traffics:
        run = stand_in.call(traffic)
        launch = Launch(traffic.channels, THREADS)
        calls.append(Call(name, bytes, run, time_call(trials, alone, run), launch, algorithm, protocol))
    measure_all(plan, trials, alone, calls, about={"communication": "stand-in"}, source="stand-in")


def measure_all(
    plan: Plan,
    trials: Any,
    ranks: Ranks,
    calls: Sequence[Call],
    *,
    about: dict[str, Any],
    builders: dict[str, Callable] | None = None,
    source: str = "pair",
) -> list[Sample]:
    """Every kernel of the plan beside every call; rank 0 writes the file, whole again after every tenth kernel."""
    builders = builders or kernels()
    names = list(plan.kernels)
    random.Random(plan.seed).shuffle(names)  # a time limit then leaves out no class as a whole
    began = time.perf_counter()
    counts, samples = Counts(), []
    described = _describe(trials, {name: builders[name] for name in names})
    for number, name in enumerate(names):
        (spent,) = ranks.largest((time.perf_counter() - began,))
        if plan.seconds and spent > plan.seconds:
            counts.left_out.update(dict.fromkeys(names[number:], "no time left"))
            break
        samples += _measure_kernel(plan, trials, ranks, calls, name, builders[name], described[name], counts, source)
        if ranks.rank == 0 and number % 10 == 9:
            _write(plan, samples, counts, about, ranks, time.perf_counter() - began)
    if ranks.rank == 0:
        _write(plan, samples, counts, about, ranks, time.perf_counter() - began)
    return samples


_FAILURES = (RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError)


def _describe(trials: Any, builders: dict[str, Callable]) -> dict[str, tuple[OpSignature, Launch]]:
    """Signature and launch geometry of every kernel that runs here, from one profiled run of all."""
    signatures: dict[str, OpSignature] = {}

    def runs():
        for name, builder in builders.items():
            with contextlib.suppress(*_FAILURES):
                run = builder(trials.device)
                signatures[name] = signature_of(run)
                yield name, run

    launches = trials.launches(runs())
    return {name: (signatures.get(name, OpSignature("")), launches.get(name, UNKNOWN)) for name in builders}


def _measure_kernel(plan, trials, ranks, calls, name, builder, described, counts: Counts, source: str) -> list[Sample]:
    problem, run = "", None
    signature, launch = described
    try:
        run = builder(trials.device)
        run()
    except _FAILURES as error:
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
    problems = [p for p in ranks.gather(problem) if p]
    if problems:
        counts.left_out[name] = problems[0][:200]
        return []
    for call in calls:
        call.refresh()
    trials.release()
    assert run is not None  # else there was a problem
    timed = time_kernel(trials, ranks, run)
    if not math.isfinite(timed.us):
        counts.left_out[name] = "no time could be taken"
        return []
    counts.kernels += 1
    mine: list[tuple[Call, int, Any]] = []
    for call in calls:
        counts.pairs += 1
        measured = measure_pair(trials, ranks, timed, call.run, call.us, plan.repeats)
        mine += [(call, repeat, m) for repeat, m in enumerate(measured)]
    everyone = ranks.gather([m for _, _, m in mine])
    common = dict(kernel=name, signature=signature, launch=launch, ranks=plan.ranks, ranks_per_node=plan.ranks)
    common |= dict(accelerator=plan.accelerator, source=source)
    found = []
    for rank, its in enumerate(everyone):
        for i, ((call, repeat, _), m) in enumerate(zip(mine, its)):
            first, stop = max(other[i].first for other in everyone), min(other[i].stop for other in everyone)
            call_us = mean_of_calls(Stamps(calls=m.calls), first, stop)
            counts.kernel_runs_kept += m.kept
            counts.kernel_runs_dropped += m.dropped
            if m.starved or (math.isnan(m.overlap_us) and math.isnan(call_us)):
                counts.repeats_dropped += 1
                continue
            found.append(
                Sample(
                    **common,
                    **_described(call),
                    rank=rank,
                    repeat=repeat,
                    base_us=m.base_us,
                    overlap_us=m.overlap_us,
                    call_base_us=m.call_base_us,
                    call_overlap_us=call_us,
                )
            )
    found += _waiting(trials, ranks, calls, timed, common)
    return found


def _waiting(trials, ranks, calls: Iterable[Call], timed, common: dict[str, Any]) -> list[Sample]:
    if ranks.size < 2:
        return []
    found = []
    middle = {call.name: call for call in reversed(list(calls)) if call.bytes >= 32 << 20}
    for call in (middle[name] for name in WAITING if name in middle):
        times = ranks.gather(measure_waiting(trials, ranks, timed, call.run, call.us))
        for rank, (base_us, waiting_us) in enumerate(times):
            if not math.isnan(waiting_us):
                found.append(
                    Sample(
                        **common,
                        **_described(call),
                        rank=rank,
                        repeat=0,
                        base_us=base_us,
                        overlap_us=math.nan,
                        call_base_us=call.us,
                        call_overlap_us=math.nan,
                        waiting_us=waiting_us,
                    )
                )
    return found


def _described(call: Call) -> dict[str, Any]:
    return {
        "call": call.name,
        "bytes": call.bytes,
        "dtype": "bfloat16",
        "channels": call.launch.blocks,
        "threads": call.launch.threads,
        "algorithm": call.algorithm,
        "protocol": call.protocol,
    }


def _write(plan: Plan, samples: list[Sample], counts: Counts, about: dict[str, Any], ranks: Ranks, seconds: float):
    said = {
        "accelerator": plan.accelerator,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "devices": ranks.size,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seed": plan.seed,
        "repeats": plan.repeats,
        "seconds": round(seconds, 1),
        "kernels": counts.kernels,
        "pairs": counts.pairs,
        "samples": len(samples),
        "repeats_dropped": counts.repeats_dropped,
        "kernel_runs_kept": counts.kernel_runs_kept,
        "kernel_runs_dropped": counts.kernel_runs_dropped,
        "left_out": counts.left_out,
        **about,
    }
    write_samples(plan.out, samples, said)
    if ranks.rank == 0:
        print(
            f"{counts.kernels} kernels, {counts.pairs} pairs, {len(samples)} samples in {seconds:.0f} s"
            f" ({counts.repeats_dropped} repeats without complete overlap or with a starved lane dropped,"
            f" {counts.kernel_runs_dropped} of {counts.kernel_runs_kept + counts.kernel_runs_dropped} kernel runs"
            f" not wholly beside a call): {plan.out}",
            flush=True,
        )


__all__ = ["CALLS", "Alone", "Plan", "Trials", "collect", "kernel_names", "measure_all"]
