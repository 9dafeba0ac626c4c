"""A real run: torchrun itself, with its own parser and agent, whose ranks leave a record behind.

Started by echo_launch.main as ``python -P -m echo_launch.torchrun SETTINGS words...``, in the launcher's place.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from echo_hooks.errors import EchoError
from echo_hooks.graph.record import RecordedRank, is_record, read_record
from echo_launch.directory import RecordDirectory
from echo_launch.recorded import BOOTSTRAP, SETTINGS


@dataclass(frozen=True)
class RealRun:
    """``words``: torchrun's own command line. ``record``: directory, "" for the next free echo-runs/SCRIPT-NNN.
    ``profile``: steps to profile, 0 for none."""

    words: tuple[str, ...]
    script: str
    record: str = ""
    profile: int = 0

    def become(self) -> NoReturn:
        """Replace this process by torchrun with the record."""
        settings = json.dumps({**asdict(self), "words": []})
        sys.stdout.flush()
        sys.stderr.flush()
        command = [sys.executable, "-P", "-m", "echo_launch.torchrun", settings, *self.words]
        os.execv(sys.executable, command)


def main(argv: list[str]) -> None:
    """Run torchrun; its exceptions and exit status are its own."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import record

    run = RealRun(**{**json.loads(argv[0]), "words": tuple(argv[1:])})
    sys.argv = ["torchrun", *run.words]
    args = torchrun.parse_args(list(run.words))
    directory = _directory(run, args)
    if directory is not None:
        _redirect(args, directory.path, run.profile)
    try:
        record(torchrun.run)(args)
    finally:
        if directory is not None:
            _tell(directory)


def _directory(run: RealRun, args) -> RecordDirectory | None:
    """The claimed directory; None, with a line that says why, when this run leaves no record."""
    reason = _unrecordable(args)
    if not reason:
        try:
            return RecordDirectory(Path(run.record) if run.record else None, run.script, shared=args.nnodes != "1")
        except EchoError as error:
            if run.record and "holds" in str(error):  # nothing has started, and what is there would be lost
                _say(str(error))
                raise SystemExit(2) from None
            reason = str(error)
    _say(f"{reason}; the run itself is torchrun's as ever, without a record")
    return None


def _unrecordable(args) -> str:
    if args.no_python:
        return "--no-python starts a program that Echo cannot look into"
    if args.run_path:
        return "--run-path runs the script inside torchrun's own process"
    other = os.environ.get("PYTHON_EXEC")
    if other and os.path.realpath(other) != os.path.realpath(sys.executable):
        return f"PYTHON_EXEC names another Python ({other})"
    return ""


def _redirect(args, directory: Path, profile: int) -> None:
    """Have torchrun start the bootstrap, which gets the script and its arguments as they are."""
    settings = {"directory": str(directory), "profile": profile, "module": bool(args.module)}
    os.environ[SETTINGS] = json.dumps(settings)
    args.training_script_args = [args.training_script, *args.training_script_args]
    args.training_script, args.module = BOOTSTRAP, False


def _tell(directory: RecordDirectory) -> None:
    """One line about what was recorded; never an error of its own."""
    try:
        directory.leave()
        if not is_record(directory.path):
            _say("no record: no rank came to an optimizer step or to its own end")
            return
        ranks = read_record(directory.path)
        _say(f"{_summary(ranks)}; echo-sim compare RUN {os.path.relpath(directory.path)}")
    except Exception as error:
        _say(f"the record cannot be read: {error}")


def _summary(ranks: list[RecordedRank]) -> str:
    times = [r.step_ms for r in ranks if r.step_ms is not None]
    seen = f"recorded {len(ranks)} of {ranks[0].world_size} ranks"
    if not times:
        return f"{seen}, no step among them"
    return f"{seen}, {max(r.steps for r in ranks)} steps, median {max(times):.2f} ms on the slowest rank"


def _say(sentence: str) -> None:
    print(f"echo-launch: {sentence}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
