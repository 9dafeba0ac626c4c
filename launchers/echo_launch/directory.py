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
            self.path = _numbered(RUNS.absolute(), _stem(script), "logs", "--out")
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


class RecordDirectory:
    """Where a real run leaves its record. ``path``: absolute. ``shared``: other nodes of the run may write there too,
    so a record that is there already is theirs."""

    def __init__(self, out: Path | None, script: str, shared: bool = False):
        if out is None:
            self.path = _numbered(RUNS.absolute(), _stem(script), "ranks", "--record")
            return
        self.path = out.absolute()
        try:
            if self.path.is_dir() and any(e.name not in ("ranks", "traces") or not shared for e in self.path.iterdir()):
                raise UsageError(f"--record {out} holds files already: choose a new or an empty directory")
            (self.path / "ranks").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--record {out}: {error.strerror}") from None

    def leave(self) -> None:
        """Remove what is empty: a run that was not recorded leaves nothing."""
        for path in (self.path / "ranks", self.path, RUNS.absolute()):
            _remove_if_empty(path)


def _stem(script: str) -> str:
    stem = Path(script).name.removesuffix(".py")
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in stem).lstrip(".") or "script"


def _numbered(parent: Path, stem: str, inside: str, option: str) -> Path:
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
            (path / inside).mkdir()
            return path
    except OSError as error:
        raise UsageError(f"{parent}: no run directory can be made there ({error.strerror}); give {option}") from None


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
