"""`echo-sim`: what can be asked of a run after it was traced, and of the hardware and network models by themselves."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from echo_hooks.errors import EchoError
from echo_launch import sim_models, sim_network, sim_overlap, sim_profile, sim_run
from echo_launch.timing import PROFILES_HELP, TIMING_HELP
from echo_launch.variations import HOST_SPEED_HELP, JITTER_HELP, OVERLAP_HELP, SLOW_NODE_HELP, SLOW_RANK_HELP

_DESCRIPTION = """Ask a traced run (a directory that echo-launch --simulate left) for its report, timeline and memory,
compose it for another cluster, or ask the hardware and network models by themselves."""

_EPILOG = """exit status: 0 answered; 2 bad arguments or files; 3 the plan does not work (hang, mismatch, out of
memory), with the reason."""

_NOT_BUILT = {
    "sweep": ("compose a run for a grid of clusters and options", "echo-sim compose takes --cluster several times"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status. Whatever a user can get wrong ends in one sentence on stderr."""
    if isinstance(sys.stdout.errors, str) and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a name may hold what the terminal's encoding lacks
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words and words[0] in _NOT_BUILT:  # before parsing: no option of theirs is known
            raise NotImplementedError(f"{words[0]} is not built yet; {_NOT_BUILT[words[0]][1]}")
        arguments = _parser().parse_args(words)
        return arguments.command(arguments)
    except EchoError as error:
        return _fail(str(error), error.exit_status)
    except NotImplementedError as error:
        return _fail(str(error), 2)
    except BrokenPipeError:  # the reader (head, less) has gone; nothing may be written at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _fail(f"{error.filename or 'output'}: {error.strerror or error}", 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


def _fail(message: str, status: int) -> int:
    print(f"echo-sim: {message}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="echo-sim", description=_DESCRIPTION, epilog=_EPILOG)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_run_commands(commands)
    _add_model_commands(commands)
    sim_overlap.add_commands(commands, _command)
    sim_profile.add_commands(commands)
    for name, (does, _) in _NOT_BUILT.items():
        commands.add_parser(name, help=f"{does} (not built yet)", add_help=False)
    return parser


def _add_run_commands(commands) -> None:
    report = _command(commands, "report", sim_run.report, "print a run's report")
    _add_run(report)
    report.add_argument("--json", action="store_true", help="print report.json instead of text")

    trace = _command(commands, "trace", sim_run.trace, "write a run's timeline for https://ui.perfetto.dev")
    _add_run(trace)
    trace.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="FILE.json or FILE.json.gz")
    trace.add_argument("--cluster", metavar="CLUSTER", help="compose for this cluster instead of the run's own")

    memory = _command(commands, "memory", sim_run.memory, "who holds device memory at the peak of each phase")
    _add_run(memory)
    memory.add_argument("--role", metavar="NAME|RANK", help="only this role, or the role of this rank")

    compose = _command(commands, "compose", sim_run.compose, "the same programs on another cluster")
    _add_run(compose)
    compose.add_argument(
        "--cluster",
        action="append",
        required=True,
        metavar="CLUSTER",
        help='a TOML file, or PRESET:NODESxGPUS such as "h800:12x8"; several times: one line each',
    )
    compose.add_argument("-o", "--output", type=Path, metavar="DIR", help="write report and timeline to DIR")
    compose.add_argument("--calibration", metavar="FILE", help="of the network, from echo-sim calibrate")
    compose.add_argument("--timing", default="auto", choices=("auto", "profile", "model"), help=TIMING_HELP)
    compose.add_argument("--profiles", action="append", type=Path, metavar="FILE", help=PROFILES_HELP)
    compose.add_argument("--overlap", metavar="FILE|formula|none", help=OVERLAP_HELP)
    compose.add_argument("--unfolded", action="store_true", help="simulate every rank by itself (slow, same times)")
    compose.add_argument("--jitter", metavar="SIGMA", help=JITTER_HELP)
    compose.add_argument("--host-speed", metavar="FACTOR", help=HOST_SPEED_HELP)
    compose.add_argument("--slow-node", action="append", metavar="NODE=FACTOR", help=SLOW_NODE_HELP)
    compose.add_argument("--slow-rank", action="append", metavar="RANK=FACTOR", help=SLOW_RANK_HELP)
    compose.add_argument("--seed", type=int, default=0, help="of the band's random numbers (default: 0)")
    compose.add_argument("--json", action="store_true", help="print the report as JSON (a list for several clusters)")

    compare = _command(commands, "compare", sim_run.compare, "a simulated step beside a measured one")
    _add_run(compare)
    compare.add_argument(
        "measured",
        type=Path,
        nargs="+",
        metavar="MEASURED",
        help="record of a real run, traces of torch.profiler (files or a directory), or JSON with step_time_ms",
    )
    compare.add_argument("--json", action="store_true", help="print JSON instead of text")


def _add_model_commands(commands) -> None:
    hardware = commands.add_parser("hardware", help="accelerators and clusters: list, show, check")
    actions = hardware.add_subparsers(title="actions", metavar="ACTION", required=True)
    _command(actions, "list", sim_models.list_hardware, "names of all accelerators and cluster presets")
    show = _command(actions, "show", sim_models.show_hardware, "every number of one, with its source")
    show.add_argument("name", metavar="NAME", help='an accelerator, "PRESET:NODESxGPUS", or a TOML file')
    check = _command(
        actions, "check", sim_models.check_hardware, "read an accelerator or cluster file and say what is wrong"
    )
    check.add_argument("file", type=Path, metavar="FILE")

    network = _command(
        commands, "network", sim_network.network, "how long one collective takes alone, or LOG against it"
    )
    network.add_argument("--cluster", required=True, metavar="CLUSTER", help="a TOML file or PRESET:NODESxGPUS")
    network.add_argument("--collective", metavar="NAME", help="all_reduce, all_gather, send, ...")
    network.add_argument(
        "--ranks", metavar="RANKS", help='such as "0-15", "0,8,16" or "0-88:8"; with --compare how many LOG was made on'
    )
    network.add_argument(
        "--bytes",
        metavar="SIZE",
        help="payload per rank, as nccl-tests counts it: the larger of the send and receive buffers; such as 1MiB",
    )
    network.add_argument("--dtype", default="bfloat16", metavar="DTYPE", help="element type (default: %(default)s)")
    network.add_argument("--calibration", metavar="FILE", help="from echo-sim calibrate, instead of the preset's")
    network.add_argument(
        "--compare", type=Path, nargs="+", metavar="LOG", help="print measured times beside predicted ones instead"
    )
    network.add_argument("--plot", type=Path, metavar="FILE.html", help="with --compare: draw it, too")
    network.add_argument("--json", action="store_true", help="print JSON instead of text")
    _add_log_options(network)

    calibrate = _command(commands, "calibrate", sim_network.calibrate, "fit the network model to measured collectives")
    calibrate.add_argument(
        "logs", type=Path, nargs="+", metavar="LOG", help="output of nccl-tests (text or JSON), CSV, NCCL's tuning log"
    )
    calibrate.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="calibration to write")
    calibrate.add_argument("--cluster", required=True, metavar="CLUSTER", help="what the logs were made on")
    calibrate.add_argument(
        "--prior",
        default="shipped",
        metavar="shipped|stock|FILE",
        help="what to stay at where the logs say nothing: the preset's calibration, NCCL's own numbers, or a file's "
        "(default: %(default)s)",
    )
    calibrate.add_argument("--collective", metavar="NAME", help="where a log does not name it")
    calibrate.add_argument("--ranks", metavar="COUNT", help="ranks, where a log does not say them")
    _add_log_options(calibrate)


def _add_log_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--on-nodes", metavar="COUNT", help="nodes that a log was made on, where it does not say")
    command.add_argument("--nccl-version", metavar="X.Y.Z", help="NCCL, where no log says it")


def _command(commands, name: str, function, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    command.set_defaults(command=function)
    return command


def _add_run(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", type=Path, metavar="RUN", help="run directory of echo-launch --simulate")


if __name__ == "__main__":
    sys.exit(main())
