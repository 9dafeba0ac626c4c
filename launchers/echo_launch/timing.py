"""--timing and --profiles: where the time of a local operation is from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from echo_hooks.errors import UsageError
from echo_hooks.timing.database import read_database

TIMING_HELP = (
    "how operations get durations: profile looks them up in measured databases and models the rest, model models all; "
    "auto (the default) is profile where nothing is executed"
)
PROFILES_HELP = "a database of echo-sim profile record, looked up before the one that comes with Echo; repeatable"


def parse_profiles(timing: str, paths: Sequence[str | Path] | None) -> tuple[Path, ...]:
    """The databases, read once so that a bad one is refused before anything is traced."""
    if paths and timing == "model":
        raise UsageError("--profiles: databases are looked up with --timing profile, not with model")
    for path in paths or ():
        read_database(Path(path))
    return tuple(map(Path, paths or ()))
