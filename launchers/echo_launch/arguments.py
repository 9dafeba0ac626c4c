"""The command line of echo-launch: torchrun's options, Echo's own, and after the script whatever the script likes."""

from __future__ import annotations

import argparse
import importlib.machinery
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from echo_hooks.errors import UsageError
from echo_hooks.network.calibration import Calibration, load_calibration
from echo_hooks.overlap.slowdowns import checked
from echo_launch import world
from echo_launch.hostfile import choose_hosts
from echo_launch.timing import PROFILES_HELP, TIMING_HELP, parse_profiles
from echo_launch.torchrun import RealRun
from echo_launch.variations import (
    HOST_SPEED_HELP,
    JITTER_HELP,
    MOE_SKEW_HELP,
    OVERLAP_HELP,
    SLOW_NODE_HELP,
    SLOW_RANK_HELP,
    MoeSkew,
    parse_host_speed,
    parse_jitter,
    parse_moe_skew,
    parse_slow,
)
from echo_launch.world import MAX_DIGITS, World

_TORCHRUN = "torchrun options"
_OWN = "simulation options (with --simulate)"
_RECORD = "options of the record (without --simulate)"


@dataclass(frozen=True)
class Launch:
    """A checked command line. ``trace_ranks``: None for Echo's choice. ``jobs``: ranks traced at once. ``jitter``:
    sigma of the noise of single kernels. ``slow_ranks``: factor on the kernel times by rank. ``local_rank_argument``:
    the script gets --local_rank=N before its own arguments, as DeepSpeed's launcher gives it. ``timing``,
    ``profiles``: where the time of an operation is from. ``calibration``: of the network, None for the one that comes
    with the accelerator. ``overlap``: a slowdown model's file, "none", or None for Echo's choice. ``moe_skew``: load of
    experts, by default balanced. ``host_speed``: of the target's processor, relative to this machine's."""

    world: World
    script: str
    args: tuple[str, ...]
    module: bool
    out: Path | None
    trace_ranks: tuple[int, ...] | None
    jobs: int
    warmup_steps: int
    steps: int
    seed: int
    json: bool
    quiet: bool
    local_rank_argument: bool = False
    jitter: float = 0.0
    slow_ranks: Mapping[int, float] = field(default_factory=dict)
    timing: str = "auto"
    host_speed: float | None = None
    profiles: tuple[Path, ...] = ()
    calibration: Calibration | None = None
    moe_skew: MoeSkew = field(default_factory=MoeSkew)
    overlap: str | None = None
    notes: tuple[str, ...] = field(default=())


def parse(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> Launch | RealRun:
    """A launch to simulate, or, without --simulate, a real run with the very arguments for torchrun.

    Raises UsageError: one sentence that says what is wrong and what would be right.
    """
    parser = _parser()
    own, script, script_args = split_at_script(parser, argv)
    options = parser.parse_args(own)
    if not options.simulate:
        given = [action.option_strings[0] for action in _actions(parser, _OWN) if _given(options, action)]
        if given:
            raise UsageError(f"{given[0]} is an option of simulation: add --simulate, or leave it out")
        if script is None:
            raise UsageError("no script given: echo-launch [options] train.py [arguments of the script]")
        profile = _whole("--profile", options.profile, 1) or 0
        words = [*_without_record_options(own), *argv[len(own) :]]
        return RealRun(tuple(words), script, options.record or "", profile)
    for action in _actions(parser, _RECORD):
        if _given(options, action):
            raise UsageError(
                f"{action.option_strings[0]} is an option of a real run: leave out --simulate, or leave it out"
            )
    _refuse_unbuilt(options)
    if options.no_python:
        raise UsageError("--no-python: only Python scripts can be simulated, as Echo watches them from inside")
    if script is None:
        raise UsageError("no script given: echo-launch --simulate [options] train.py [arguments of the script]")
    _check_script(script, options.module)
    hosts = choose_hosts(
        options.hostfile,
        options.include,
        options.exclude,
        _whole("--num_nodes", options.num_nodes, 1),
        _whole("--num_gpus", options.num_gpus, 1),
        len(world.local_accelerators()),
    )
    resolved = world.resolve_world(
        world_size=_whole("--world-size", options.world_size, 1),
        nnodes=options.nnodes,
        nproc_per_node=options.nproc_per_node,
        cluster=options.cluster,
        environment=environment,
        hosts=hosts,
    )
    jobs = _whole("--jobs", options.jobs, 1)
    return Launch(
        world=resolved,
        script=script,
        args=tuple(script_args),
        module=options.module,
        out=Path(options.out) if options.out is not None else None,
        trace_ranks=parse_ranks(options.trace_ranks, resolved.world_size),
        # Host times are measured while the rank runs, so each rank wants a core of its own.
        jobs=jobs if jobs is not None else min(2, os.cpu_count() or 1),
        warmup_steps=_whole("--warmup-steps", options.warmup_steps, 0) or 0,
        steps=_whole("--steps", options.steps, 1) or 1,
        seed=_whole("--seed", options.seed, 0) or 0,
        json=options.json,
        quiet=options.quiet,
        jitter=parse_jitter(options.jitter),
        local_rank_argument=hosts is not None and not options.no_local_rank,
        timing=options.timing,
        host_speed=parse_host_speed(options.host_speed),
        profiles=parse_profiles(options.timing, options.profiles),
        slow_ranks=parse_slow(options.slow_node, options.slow_rank, resolved.world_size, resolved.nproc_per_node),
        calibration=load_calibration(options.calibration) if options.calibration is not None else None,
        moe_skew=parse_moe_skew(options.moe_skew),
        overlap=checked(options.overlap),
    )


def split_at_script(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[list[str], str | None, list[str]]:
    """(launcher's arguments, script, script's arguments): the script is the first word that belongs to no option.

    argparse alone would look for its own options behind the script too, and for abbreviations of them.
    """
    known = parser._option_string_actions
    i = 0
    while i < len(argv):
        word = argv[i]
        if word == "--":
            return list(argv[:i]), *_head(argv[i + 1 :])
        if not word.startswith("-") or word == "-":
            return list(argv[:i]), *_head(argv[i:])
        action = known.get(word)
        takes_value = action is not None and action.nargs != 0  # "--name=value" and "-r3" carry theirs with them
        i += 2 if takes_value else 1
    return list(argv), None, []


def _head(words: Sequence[str]) -> tuple[str | None, list[str]]:
    return (words[0], list(words[1:])) if words else (None, [])


def parse_ranks(text: str, world_size: int) -> tuple[int, ...] | None:
    """ "auto" gives None, "all" every rank; else ranks and ranges: "0,5,95", "0-7", "0-88:8"."""
    if text == "auto":
        return None
    if text == "all":
        return tuple(range(world_size))
    ranks: set[int] = set()
    for part in text.split(","):
        span, _, stride = part.strip().partition(":")
        first, dash, last = span.partition("-")
        numbers = [first, *([last] if dash else []), *([stride] if ":" in part else [])]
        if not all(n.isascii() and n.isdigit() and len(n) <= MAX_DIGITS for n in numbers) or (
            ":" in part and (not dash or int(stride) < 1)
        ):
            raise UsageError(f"--trace-ranks {text}: {part!r} is no rank; give auto, all or a list: 0,5,8-15,0-88:8")
        low, high = int(first), int(last) if dash else int(first)
        if low > high or high >= world_size:
            raise UsageError(f"--trace-ranks {text}: {part!r} is outside the ranks 0 to {world_size - 1}")
        ranks.update(range(low, high + 1, int(stride) if stride else 1))
    return tuple(sorted(ranks))


# ---- the parser ----


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (echo-launch --help lists the options)")


def _parser() -> _Parser:
    parser = _Parser(
        prog="echo-launch",
        usage="echo-launch [options] script.py [arguments of the script]",
        description="Launch a distributed script as torchrun does, or with --simulate find out on one machine how long "
        "one training step takes on a cluster, whether it fits, and whether it runs at all.",
        epilog="Everything after the script belongs to the script. Exit status: 0 simulated; 1 the script failed; "
        "2 bad arguments or files; 3 the plan does not work (hang, mismatch, out of memory).",
        allow_abbrev=False,
    )
    own = parser.add_argument_group(_OWN)
    parser.add_argument("--simulate", action="store_true", help="simulate the job instead of running it")
    _add(own, "--world-size", help="number of ranks; left out: --nnodes times --nproc-per-node, or the cluster's size")
    _add(own, "--cluster", help="PRESET:NODESxGPUS, for example h800:12x8, or a TOML file")
    _add(own, "--out", help="run directory (default: echo-runs/SCRIPT-NNN)")
    _add(own, "--trace-ranks", default="auto", help="auto, all, or a list such as 0,5,8-15 (default: auto)")
    _add(own, "--jobs", help="ranks traced at once (default: 2, or 1 on one core)")
    _add(own, "--executor", default="local", choices=("local", "ray"), help="where ranks are traced")
    _add(own, "--timing", default="auto", choices=("auto", "execute", "profile", "model"), help=TIMING_HELP)
    _add(own, "--profiles", action="append", metavar="FILE", help=PROFILES_HELP)
    _add(own, "--calibration", help="constants of the network, from echo-sim calibrate")
    _add(own, "--overlap", metavar="FILE|formula|none", help=OVERLAP_HELP)
    _add(own, "--warmup-steps", default="1", help="optimizer steps before the measured ones (default: 1)")
    _add(own, "--steps", default="1", help="measured optimizer steps (default: 1)")
    _add(own, "--seed", default="0", help="of every random generator (default: 0)")
    _add(own, "--jitter", metavar="SIGMA", help=JITTER_HELP)
    _add(own, "--slow-node", action="append", metavar="NODE=FACTOR", help=SLOW_NODE_HELP)
    _add(own, "--slow-rank", action="append", metavar="RANK=FACTOR", help=SLOW_RANK_HELP)
    _add(own, "-H", "--hostfile", help="lines HOST slots=COUNT, as DeepSpeed's launcher reads them")
    _add(own, "-i", "--include", metavar="HOSTS", help="of the host file: HOST@HOST:SLOT,SLOT; all slots where none")
    _add(own, "-e", "--exclude", metavar="HOSTS", help="the others of the host file")
    _add(own, "--num-nodes", help="the host file's first nodes")
    _add(own, "--num-gpus", "--num-accelerators", help="first devices of each node; without a host file of one node")
    for name in ("--no-local-rank", "--no-ssh", "--no-ssh-check", "--force-multi", "--save-pid",
                 "--bind-cores-to-rank"):  # fmt: skip
        _add(own, name, action="store_true", help=argparse.SUPPRESS)
    for name in ("--launcher", "--launcher-args", "--autotuning", "--enable-each-rank-log", "--bind-core-list",
                 "--ssh-port", "--venv-script", "--log-level"):  # fmt: skip
        _add(own, name, help=argparse.SUPPRESS)
    _add(own, "--host-speed", metavar="FACTOR", help=HOST_SPEED_HELP)
    _add(own, "--moe-skew", metavar="SKEW", help=MOE_SKEW_HELP)
    _add(own, "--json", action="store_true", help="print report.json; the script's own output goes to stderr")
    _add(own, "--quiet", action="store_true", help="no progress, and the script's output only into logs")
    record = parser.add_argument_group(_RECORD, "a real run leaves step times and peak memory for echo-sim compare")
    _add(record, "--record", metavar="DIR", help="where the record goes (default: echo-runs/SCRIPT-NNN)")
    _add(record, "--profile", metavar="N", help="profile N steps of every rank with torch.profiler")
    torchrun = parser.add_argument_group(
        _TORCHRUN, "taken as torchrun takes them; in a simulation only --nnodes, --nproc-per-node and -m matter"
    )
    _add(torchrun, "--nnodes", help="number of nodes")
    _add(torchrun, "--nproc-per-node", help="ranks a node: a number, or gpu or auto for all accelerators of a node")
    _add(torchrun, "-m", "--module", action="store_true", help="the script is a module, as for python -m")
    _add(torchrun, "--no-python", action="store_true", help="the script is a program of its own")
    for name in ("--run-path", "--standalone", "--virtual-local-rank"):
        _add(torchrun, name, action="store_true", help=argparse.SUPPRESS)
    for names in (
        ("-r", "--redirects"),
        ("-t", "--tee"),
        *((name,) for name in _TORCHRUN_VALUES),
    ):
        _add(torchrun, *names, help=argparse.SUPPRESS)
    return parser


_TORCHRUN_VALUES = (
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
    "--max-restarts",
    "--monitor-interval",
    "--start-method",
    "--event-log-handler",
    "--role",
    "--log-dir",
    "--local-ranks-filter",
    "--duplicate-stdout-filters",
    "--duplicate-stderr-filters",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--local-addr",
    "--logs-specs",
    "--numa-binding",
    "--signals-to-handle",
    "--shutdown-timeout",
)


def _add(group, *names: str, **settings) -> None:
    """One option under both of torchrun's spellings, with - and with _."""
    spellings = dict.fromkeys(names)
    spellings.update(dict.fromkeys("--" + name[2:].replace("-", "_") for name in names if name.startswith("--")))
    group.add_argument(*spellings, **settings)


def _actions(parser: argparse.ArgumentParser, title: str) -> list[argparse.Action]:
    return next(group for group in parser._action_groups if group.title == title)._group_actions


def _without_record_options(words: list[str]) -> list[str]:
    """torchrun's part of the launcher's own words."""
    kept: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in ("--record", "--profile"):
            skip = True
        elif not word.startswith(("--record=", "--profile=")):
            kept.append(word)
    return kept


def _given(options: argparse.Namespace, action: argparse.Action) -> bool:
    return getattr(options, action.dest) != action.default


# ---- checks ----

_UNBUILT = {"autotuning": ""}


def _refuse_unbuilt(options: argparse.Namespace) -> None:
    """An option that is not built yet is refused, never ignored."""
    for name in _UNBUILT:
        if getattr(options, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} is not built yet: leave it out")
    if options.executor != "local":
        raise UsageError(f"--executor {options.executor} is not built yet: use --executor local")


def _whole(name: str, text: str | None, least: int) -> int | None:
    if text is None:
        return None
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS) or int(text) < least:
        raise UsageError(f"{name} {text}: a whole number from {least} is needed")
    return int(text)


def _check_script(script: str, module: bool) -> None:
    if module:
        top = script.partition(".")[0]
        path = [os.getcwd(), *sys.path]
        if not top or importlib.machinery.PathFinder.find_spec(top, path) is None:
            raise UsageError(f"-m {script}: no module {top!r} in the current directory or among the installed packages")
        return
    path_ = Path(script)
    if path_.is_dir():
        raise UsageError(f"{script} is a directory: name the Python file in it that is to run")
    if not path_.exists():
        raise UsageError(f"{script}: no such file (options go before the script; a module needs -m)")
    if not path_.is_file():
        raise UsageError(f"{script} is no regular file")
    try:
        with path_.open("rb"):
            pass
    except OSError as error:
        raise UsageError(f"{script} cannot be read: {error.strerror}") from None
