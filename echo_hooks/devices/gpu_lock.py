"""Processes of Echo that execute scripts on this machine's GPUs: whoever measures has the machine's hosts to itself."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

QUIET_WAIT_S = 180.0
"""Patience with others of Echo's at work: longer than most models take to set up."""

_ALL = "machine"


class GpuLock:
    """Locks of a device (as CUDA_VISIBLE_DEVICES names it): one that its users share, one of whoever measures on it.
    Two are the machine's. One is shared by all that set up, read or compose, and held alone while a rank is measured,
    since what else runs on the machine makes its host times longer. The other is shared by all that measure or wait for
    that: nobody begins work meanwhile, so that of many simulations all measure before the first goes on. All are free
    again at the latest when the process ends.
    """

    def __init__(self, device: str | None = None):
        name = os.environ.get("CUDA_VISIBLE_DEVICES", "0") if device is None else device
        self._users, self._turn = _path(name, "users"), _path(name, "turn")
        self._work, self._measuring = _path(_ALL, "work"), _path(_ALL, "measuring")
        self._files: dict[str, int] = {}

    def join(self) -> None:
        """Say that this process uses the device."""
        self._lock(self._users, fcntl.LOCK_SH)

    def begin_work(self) -> None:
        """Wait until no rank is measured on this machine nor about to be, for QUIET_WAIT_S at most; until this process
        takes its turn or leaves, none will be."""
        if self._lock_within(QUIET_WAIT_S, self._measuring, fcntl.LOCK_EX):
            self._lock_within(QUIET_WAIT_S, self._work, fcntl.LOCK_SH)
            self._unlock(self._measuring)

    def take_turn(self) -> bool:
        """Wait until no other rank is measured on the device, and (for QUIET_WAIT_S at most) until all others of Echo's
        on this machine have stopped their work. Returns whether they have. Again does nothing."""
        if self._turn in self._files:
            return True
        self._unlock(self._work)
        self._lock(self._measuring, fcntl.LOCK_SH)
        self._lock(self._turn, fcntl.LOCK_EX)
        return self._lock_within(QUIET_WAIT_S, self._work, fcntl.LOCK_EX)

    def end_turn(self) -> None:
        """Measured: others may, and this process goes on working."""
        for path in (self._work, self._turn, self._measuring):
            self._unlock(path)
        self.begin_work()

    def in_use(self) -> bool:
        """Whether another process of Echo uses the device."""
        try:
            self._lock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            self.leave()
        return False

    def leave(self) -> None:
        """Give all of them up."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _lock_within(self, seconds: float, path: str, how: int) -> bool:
        """Whether the lock was to be had in that time."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self._lock(path, how | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                self._unlock(path)
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.02)

    def _lock(self, path: str, how: int) -> None:
        if path not in self._files:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._files[path] = file = os.open(path, flags, 0o600)
            fcntl.flock(file, how)

    def _unlock(self, path: str) -> None:
        if path in self._files:
            os.close(self._files.pop(path))


@contextmanager
def at_work(executing: bool) -> Iterator[None]:
    """What runs inside is work that a measurement on this machine waits for; nothing where no script is executed."""
    lock = GpuLock()
    if executing:
        lock.begin_work()
    try:
        yield
    finally:
        lock.leave()


def _path(name: str, kind: str) -> str:
    name = re.sub(r"[^A-Za-z0-9-]", "_", name)
    return os.path.join(tempfile.gettempdir(), f"echo-gpu-{os.getuid()}-{name}.{kind}")
