"""Processes of Echo that use one GPU: they know of each other, and one at a time runs its steps."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile

CPUS = "ECHO_MEASURING_CPUS"
"""Environment: processors (as "8,9,10") to which a process moves while it measures, where several take turns."""


class GpuLock:
    """Two lock files for a device (as CUDA_VISIBLE_DEVICES names it): one that its users share, one of whoever
    measures. Both are free again at the latest when the process ends."""

    def __init__(self, device: str | None = None):
        name = re.sub(r"[^A-Za-z0-9-]", "_", os.environ.get("CUDA_VISIBLE_DEVICES", "0") if device is None else device)
        stem = os.path.join(tempfile.gettempdir(), f"echo-gpu-{os.getuid()}-{name}")
        self._users, self._turn = f"{stem}.users", f"{stem}.turn"
        self._files: dict[str, int] = {}

    def join(self) -> None:
        """Say that this process uses the device."""
        self._lock(self._users, fcntl.LOCK_SH)

    def take_turn(self) -> None:
        """Wait until no other process of Echo runs its steps on the device; again does nothing."""
        if self._lock(self._turn, fcntl.LOCK_EX) and (cpus := os.environ.get(CPUS)):
            os.sched_setaffinity(0, [int(number) for number in cpus.split(",")])

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
        """Give both up."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _lock(self, path: str, how: int) -> bool:
        """False when this object holds it already."""
        if path in self._files:
            return False
        self._files[path] = file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(file, how)
        return True
