"""Processes of Echo that use one GPU: they know of each other, and one at a time runs its steps."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
import time

WAVE = "ECHO_GPU_WAVE"
"""Environment, "DIRECTORY:COUNT": a process takes its first turn only once so many are ready for theirs (each leaves a
file in the directory), so that none measures while another still sets up."""

_WAVE_SECONDS = 90.0  # some of the others may have failed


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
        if self._turn not in self._files:
            _await_wave(os.environ.get(WAVE, ""))
            self._lock(self._turn, fcntl.LOCK_EX)

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

    def _lock(self, path: str, how: int) -> None:
        if path not in self._files:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._files[path] = file = os.open(path, flags, 0o600)
            fcntl.flock(file, how)


def _await_wave(setting: str) -> None:
    directory, _, count = setting.rpartition(":")
    if not (directory and count.isdigit() and os.path.isdir(directory)):
        return
    os.close(os.open(os.path.join(directory, str(os.getpid())), os.O_WRONLY | os.O_CREAT, 0o600))
    deadline = time.monotonic() + _WAVE_SECONDS
    while len(os.listdir(directory)) < int(count) and time.monotonic() < deadline:
        time.sleep(0.05)
