"""The run directory as the launcher makes it: claimed by one command, and nothing misleading left when that fails."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from echo_hooks.errors import UsageError

RUNS = Path("echo-runs")
_OURS = ("logs", "ranks", "payloads")  # what tracing leaves; the rest is written only once all ranks are traced


class RunDirectory:
    """``path``: absolute. A context manager: unless ``keep()`` was called, leaving it removes what is worth nothing."""

    def __init__(self, out: Path | None, script: str):
        self._made = True
        if out is None:
            self.path = _numbered(RUNS.absolute(), _stem(script))
        else:
            self.path = out.absolute()
            self._made = _claimed(self.path)
        self._kept = False

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_) -> None:
        if self._kept or self.holds_something():
            return
        for name in _OURS:
            shutil.rmtree(self.path / name, ignore_errors=True)
        if self._made:
            _remove_if_empty(self.path)
            _remove_if_empty(RUNS.absolute())

    def clear(self) -> None:
        """Forget what an attempt has left that is made again in another way."""
        for name in _OURS:
            shutil.rmtree(self.path / name, ignore_errors=True)
        (self.path / "logs").mkdir()

    def keep(self) -> None:
        """The run is complete."""
        self._kept = True

    def holds_something(self) -> bool:
        """A finished rank, or output of the script."""
        return any((self.path / "ranks").glob("[0-9]*.parquet")) or any(
            log.stat().st_size for log in (self.path / "logs").glob("*.log")
        )


def _stem(script: str) -> str:
    stem = Path(script).name.removesuffix(".py")
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in stem).lstrip(".") or "script"


def _numbered(parent: Path, stem: str) -> Path:
    """The first free STEM-NNN, made here and now: two commands started together get two directories."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            path = parent / f"{stem}-{number:03d}"
            try:
                path.mkdir()
            except FileExistsError:
                number += 1
                continue
            (path / "logs").mkdir()
            return path
    except OSError as error:
        raise UsageError(f"{parent}: no run directory can be made there ({error.strerror}); give --out") from None


def _claimed(path: Path) -> bool:
    """Make or take an empty directory; True when it was made here."""
    try:
        made = not path.exists()
        if not made and path.is_dir() and any(path.iterdir()):
            what = "a run" if (path / "manifest.json").exists() else "files"
            raise UsageError(f"--out {path} holds {what} already: choose a new or an empty directory")
        path.mkdir(parents=True, exist_ok=True)
        (path / "logs").mkdir()  # the claim: of two commands only one succeeds
        return made
    except FileExistsError:
        what = "is in use by another command" if path.is_dir() else "is no directory"
        raise UsageError(f"--out {path} {what}") from None
    except OSError as error:
        raise UsageError(f"--out {path}: {error.strerror}") from None


def _remove_if_empty(path: Path) -> None:
    with contextlib.suppress(OSError):  # somebody keeps something there
        path.rmdir()
