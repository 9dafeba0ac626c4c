"""Process trees that end when they should: with their parent, with their rank, or on request."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

# <linux/prctl.h>
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(number: signal.Signals, parent: int) -> None:
    """Get signal ``number`` when process ``parent`` ends, even by SIGKILL. Linux only; elsewhere a pipe's end tells."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the call above
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends (Linux only)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def kill_group(group: int) -> None:
    """SIGKILL to every process of a process group; none left is fine."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def children() -> list[int]:
    """Direct children of this process, adopted orphans among them (Linux only, else none)."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except (OSError, ValueError):
        return []


def kill_children() -> None:
    """SIGKILL to all direct children, and to those who become children when these end."""
    for _ in range(100):  # a tree that grows faster than it is cut is given up
        found = children()
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
