"""echo-launch: run a script as torchrun does, or simulate the whole job on this machine.

Exit status: 0 simulated; 1 the script failed; 2 bad arguments or files; 3 the plan does not work.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

import echo_hooks
from echo_hooks.compose.check import check
from echo_hooks.compose.roles import RankFacts, roles_from_facts
from echo_hooks.devices.gpu_lock import at_work
from echo_hooks.errors import EchoError, ExecuteFailed, NothingSimulated, PlanError, ScriptError
from echo_hooks.graph.problems import BROKEN_PLAN, rank_ranges
from echo_hooks.graph.roles import Role
from echo_hooks.graph.rundir import Run, read_run, read_trace, write_groups, write_manifest, write_roles
from echo_hooks.hardware.cluster import load_cluster
from echo_hooks.mode import Mode, choose_mode, next_best
from echo_launch.arguments import Launch, parse
from echo_launch.directory import RunDirectory
from echo_launch.pool import TRACER, LocalPool
from echo_launch.progress import TracingProgress
from echo_launch.schedule import Schedule
from echo_launch.torchrun import RealRun
from echo_launch.tracing import Traced, trace_ranks
from echo_launch.variations import MoeSkew


def main(
    argv: Sequence[str] | None = None, *, tracer: str = TRACER, finish: Callable[[Run, Launch], Outcome] | None = None
) -> int:
    """The command line. ``tracer`` (a module with Job and Tracer) and ``finish`` are for tests."""
    try:
        with _signals_as_exceptions():
            launch = parse(sys.argv[1:] if argv is None else argv)
            if isinstance(launch, RealRun):
                launch.become()
            return _simulate(launch, tracer, finish or compose_and_report)
    except EchoError as error:
        return _explain(error)
    except OSError as error:  # the run directory's disk is full, or it was taken away
        if error.strerror is None:
            raise
        _say(f"{error.filename or 'a file of the run'}: {error.strerror}")
        return 2
    except _Interrupted as interrupted:
        print(f"echo-launch: ended by {interrupted.signal.name}", file=sys.stderr)
        return 128 + interrupted.signal


# ---- a simulation ----


@dataclass(frozen=True)
class Outcome:
    """What composing gave. ``problems``: (kind, message)."""

    problems: list[tuple[str, str]]
    show: Callable[[Console], None]
    json: Callable[[], str]


def _simulate(launch: Launch, tracer: str, finish: Callable[[Run, Launch], Outcome]) -> int:
    balanced = _balanced(launch, tracer, finish) if launch.moe_skew.text else None
    with RunDirectory(launch.out, launch.script) as directory:
        try:
            run, traced = _trace(launch, tracer, directory, balanced)
        finally:
            if directory.holds_something() and not (directory.path / "manifest.json").exists():
                _say(f"unfinished: {directory.path} has no manifest and is no run; its logs and traces are kept there")
        directory.keep()
        with at_work(run.manifest["timing"] == "execute"):
            outcome = _finished(finish, run, launch, traced)
    if launch.json:
        sys.stdout.write(outcome.json())
    else:
        outcome.show(Console())
    return 3 if any(kind in BROKEN_PLAN for kind, _ in outcome.problems) else 0


def _balanced(launch: Launch, tracer: str, finish: Callable[[Run, Launch], Outcome]) -> dict[str, Any]:
    """The other end of the range: figures of the same job with an even load of experts. Its run is not kept."""
    even = replace(launch, moe_skew=MoeSkew(), json=False)
    with tempfile.TemporaryDirectory(prefix="echo-balanced-") as place, RunDirectory(Path(place) / "run", "") as inner:
        run, traced = _trace(even, tracer, inner)
        report = json.loads(_finished(finish, run, even, traced).json())
    return {
        "step_time_ms": report["step_time_ms"],
        "peak_reserved_bytes": max((role["peak_reserved_bytes"] for role in report["roles"]), default=0),
    }


def _trace(
    launch: Launch, tracer: str, directory: RunDirectory, balanced: dict[str, Any] | None = None
) -> tuple[Run, Traced]:
    """In the launch's mode of timing, or where that cannot be, in the next best one."""
    product = load_cluster(launch.world.cluster).accelerator.product
    mode = choose_mode(launch.timing, product, skewed=bool(launch.moe_skew.text))
    if mode.note:
        _say(mode.note)
    try:
        return _trace_as(mode, launch, tracer, directory, balanced)
    except ExecuteFailed as error:
        mode = next_best(str(error))
        _say(mode.note)
        directory.clear()
        return _trace_as(mode, launch, tracer, directory, balanced)


def _trace_as(
    mode: Mode, launch: Launch, tracer: str, directory: RunDirectory, balanced: dict[str, Any] | None
) -> tuple[Run, Traced]:
    world = launch.world
    job = {
        "world_size": world.world_size,
        "nproc_per_node": world.nproc_per_node,
        "cluster": world.cluster,
        "script": launch.script,
        "args": launch.args,
        "module": launch.module,
        "local_rank_argument": launch.local_rank_argument,
        "warmup_steps": launch.warmup_steps,
        "steps": launch.steps,
        "seed": launch.seed,
        "out": str(directory.path),
        "timing": mode.timing,
        "moe_hot": launch.moe_skew.hot,
        "moe_sampled": launch.moe_skew.sampled,
    }
    schedule = Schedule(world.world_size, world.nproc_per_node, launch.trace_ranks)
    shown_rank = -1 if launch.quiet else schedule.first().ranks[0][0]
    stdout = 2 if launch.json or launch.quiet else 1  # with --json stdout is the report's alone
    with TracingProgress(launch.jobs, launch.quiet) as progress:
        progress.say(f"simulating {world.world_size} ranks, {world.nproc_per_node} a node, on {world.cluster}")
        if world.note:
            progress.say(world.note)
        with LocalPool(job, tracer=tracer, shown_rank=shown_rank, stdout=stdout, gpu=mode.gpu) as pool:
            jobs = 1 if mode.timing == "execute" else launch.jobs
            traced = trace_ranks(pool, schedule, directory.path, jobs, progress.traced)
            versions = pool.versions
    for sentence in traced.unsettled:
        _say(sentence)
    write_groups(directory.path, traced.groups)
    try:
        roles = roles_from_facts(traced.facts, traced.groups, world.world_size, world.nproc_per_node)
    except EchoError as error:
        raise traced.failure or error from None
    if traced.failure is not None and not _explains(traced, roles, directory):
        raise traced.failure
    write_roles(directory.path, roles)
    whole = manifest(launch, traced, versions, roles, mode)
    if balanced is not None:
        whole["moe"] = {"skew": launch.moe_skew.text, "balanced": balanced}
        whole["assumptions"].append(_range_of_experts(launch, balanced))
    write_manifest(directory.path, whole)
    return read_run(directory.path), traced


def _explains(traced: Traced, roles: list[Role], directory: RunDirectory) -> bool:
    """Whether the ranks had made calls that do not match before the script failed: then it fails for that."""
    world_size = sum(len(role.ranks) for role in roles)
    traces = {role.traced_rank: read_trace(directory.path, role.traced_rank) for role in roles}
    explains = any(problem.kind == "mismatch" for problem in check(world_size, traced.groups, roles, traces))
    if explains:
        _say(f"the script failed after calls that do not match: {str(traced.failure).splitlines()[0]}")
    return explains


def _finished(finish: Callable[[Run, Launch], Outcome], run: Run, launch: Launch, traced: Traced) -> Outcome:
    """The outcome; where a rank made no step, that is the error unless the plan itself explains it."""
    idle = [fact for fact in traced.facts.values() if fact.nothing]
    if not idle:
        return finish(run, launch)
    unexplained = NothingSimulated(idle[0].nothing, idle[0].rank)
    try:
        outcome = finish(run, launch)
    except EchoError:
        raise unexplained from None
    if not any(kind in ("hang", "mismatch") for kind, _ in outcome.problems):
        raise unexplained
    return outcome


def compose_and_report(run: Run, launch: Launch) -> Outcome:
    """Durations, composition, report and its files, for the launch's own cluster."""
    from echo_hooks.analysis import analyse
    from echo_hooks.hardware.cluster import load_cluster
    from echo_hooks.report.files import write_files
    from echo_hooks.report.terminal import print_report

    analysis = analyse(
        run,
        load_cluster(launch.world.cluster),
        slow_ranks=launch.slow_ranks,
        jitter=launch.jitter,
        seed=launch.seed,
        calibration=launch.calibration,
        timing=run.manifest["timing"],
        profiles=launch.profiles,
        host_speed=launch.host_speed,
        overlap=launch.overlap,
    )
    report = analysis.report
    write_files(run.path, run, analysis.composition, report)
    return Outcome(
        [(problem["kind"], problem["message"]) for problem in report.problems],
        lambda console: print_report(report, console, directory=run.path),
        report.to_json,
    )


def manifest(
    launch: Launch, traced: Traced, versions: Mapping[str, str], roles: list[Role], mode: Mode
) -> dict[str, Any]:
    """What is written last: its presence says that the run is whole."""
    world = launch.world
    return {
        "script": launch.script,
        "args": list(launch.args),
        "module": launch.module,
        "directory": os.getcwd(),
        "world_size": world.world_size,
        "nproc_per_node": world.nproc_per_node,
        "cluster": world.cluster,
        "warmup_steps": launch.warmup_steps,
        "steps": launch.steps,
        "seed": launch.seed,
        "timing": mode.timing,
        "executed_on": mode.product,
        "versions": {"echo-hooks": echo_hooks.__version__, **versions, **traced.packages},
        "traced_ranks": sorted(traced.facts),
        "traced_because": {str(rank): traced.reasons[rank] for rank in sorted(traced.facts)},
        "traced_twice": traced.retraced,
        "assumed_equal": [
            {"ranks": rank_ranges(assumed), "to": role.traced_rank, "why": role.why}
            for role in roles
            if (assumed := set(role.ranks) - set(role.proven))
        ],
        "assumptions": [*(note for note in (world.note, mode.note) if note), *traced.unsettled],
        "made_up_values": _made_up_values(traced.facts),
        "nccl_environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("NCCL_", "HCCL_"))},
        "peak_rss_bytes": traced.peak_rss_bytes,
        "complete": True,
    }


def _range_of_experts(launch: Launch, balanced: Mapping[str, Any]) -> str:
    step, size = balanced["step_time_ms"], balanced["peak_reserved_bytes"]
    time = "takes no step" if step is None else f"takes {step:.4g} ms a step"
    return (
        f"load of experts: this is --moe-skew {launch.moe_skew.text}; balanced, the job {time} on"
        f" {launch.world.cluster} and its fullest rank reserves {size / 2**30:.2f} GiB"
    )


def _made_up_values(facts: Mapping[int, RankFacts]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for fact in facts.values():
        for assumption in fact.assumptions:
            counts[assumption.kind] = counts.get(assumption.kind, 0) + assumption.count
    return dict(sorted(counts.items()))


# ---- how it ends badly ----


def _explain(error: EchoError) -> int:
    if isinstance(error, ScriptError) and error.traceback:
        sys.stderr.write(error.traceback if error.traceback.endswith("\n") else error.traceback + "\n")
    _say(str(error))
    if isinstance(error, PlanError):
        for problem in error.problems[:1]:
            if problem.ranks:
                _say(f"ranks concerned: {rank_ranges(problem.ranks)}")
    return error.exit_status


def _say(sentence: str) -> None:
    print(f"echo-launch: {sentence}", file=sys.stderr)


class _Interrupted(BaseException):
    def __init__(self, number: int):
        self.signal = signal.Signals(number)


@contextmanager
def _signals_as_exceptions():
    """SIGINT, SIGTERM and SIGHUP unwind the stack once, so that everything started is ended; later ones are ignored."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(number: int, _frame) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise _Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
