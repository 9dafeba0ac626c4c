"""One traced rank, in the process forked for it: run, write the trace, write down how it went."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.metadata
import json
import os
import resource
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from echo_hooks.errors import EchoError, ExecuteFailed, NothingSimulated, ScriptError
from echo_hooks.graph.rundir import write_trace


def trace_rank(tracer: Any, settings: dict[str, Any], rank: int, result: IO[bytes]) -> None:
    """Trace ``rank`` into the run directory; ``result`` gets the fields of echo_launch.pool.Result as JSON."""
    out = Path(settings["job"]["out"])
    if rank != settings["shown_rank"]:
        _redirect(log_path(out, rank))
    faulthandler.enable()  # a crash in native code leaves at least the Python stack in the log
    answer: dict[str, Any] = {"outcome": "ok"}
    try:
        write_trace(out, tracer.trace(rank))
        if rank == settings["versions_of"]:
            answer["packages"] = _packages(sys.modules["__main__"])
    except NothingSimulated as error:
        if error.trace is not None:
            write_trace(out, error.trace)
        answer = {"outcome": "nothing", "message": str(error), "traced": error.trace is not None}
    except ScriptError as error:
        if error.trace is not None:
            write_trace(out, error.trace)
        answer = {"outcome": "script_error", "message": str(error), "traceback": error.traceback}
        answer["traced"] = error.trace is not None
    except ExecuteFailed as error:
        answer = {"outcome": "execute_failed", "message": str(error)}
    except EchoError as error:
        answer = {"outcome": "echo_error", "message": str(error), "status": error.exit_status}
    except BaseException as error:
        message = f"rank {rank}: Echo itself failed: {type(error).__name__}: {error}"
        answer = {"outcome": "internal", "message": message, "traceback": traceback.format_exc()}
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the script may have replaced or closed it
            stream.flush()
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB, macOS in bytes (getrusage(2))
    answer["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    result.write(json.dumps(answer).encode())
    result.flush()


def log_path(directory: Path, rank: int) -> Path:
    """Where the output of a rank goes that is not shown."""
    return directory / "logs" / f"{rank:05d}.log"


def _redirect(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _packages(main: ModuleType) -> dict[str, str]:
    """Installed distributions that the script itself imports from, with their versions."""
    names = set()
    for value in list(vars(main).values()):
        module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(module, str):
            names.add(module.partition(".")[0])
    found = importlib.metadata.packages_distributions()
    distributions = sorted({d for name in names & found.keys() for d in found[name]})
    return {distribution: importlib.metadata.version(distribution) for distribution in distributions}
