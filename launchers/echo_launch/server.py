"""The fork server: imports torch and the script's frameworks once, then forks one child for each rank to trace.

Started by echo_launch.pool as ``python -u -P -m echo_launch.server COMMANDS ANSWERS PARENT`` with two inherited pipe
ends. Both ways one JSON object a line: first the settings, then ``{"trace": rank}``; back come the events ``ready`` or
``failed``, ``started`` and ``done``. The end of the command pipe ends the server and all below it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import platform
import select
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from typing import IO, Any

from echo_hooks.devices.gpu_lock import at_work
from echo_hooks.errors import EchoError, ExecuteFailed
from echo_hooks.runner import set_import_path
from echo_launch.child import trace_rank
from echo_launch.processes import adopt_orphans, die_with_parent, kill_children, kill_group


def main(argv: list[str]) -> int:
    """The server's process; its exit status."""
    commands, answers, parent = (int(text) for text in argv)
    os.set_inheritable(commands, False)
    os.set_inheritable(answers, False)
    die_with_parent(signal.SIGTERM, parent)
    adopt_orphans()
    server = _Server(commands, answers)
    try:
        return server.run()
    except BrokenPipeError:  # the launcher is gone
        return 1
    finally:
        server.kill()


@dataclass
class _Child:
    rank: int
    result: IO[bytes]
    began: float


class _Server:
    def __init__(self, commands: int, answers: int):
        self.commands = commands
        self.answers = answers
        self.active: dict[int, _Child] = {}
        self.buffer = b""
        self.wake_read, self.wake_write = os.pipe()
        for end in (self.wake_read, self.wake_write):
            os.set_blocking(end, False)

    def run(self) -> int:
        signal.signal(signal.SIGTERM, lambda *_: self._end())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
        settings = self._read_line()
        tracer = self._prepare(settings) if settings else None
        if settings is None or tracer is None:
            return 1
        signal.set_wakeup_fd(self.wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            readable, _, _ = select.select([self.commands, self.wake_read], [], [])
            if self.wake_read in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wake_read, 4096)
                self._reap()
            if self.commands in readable:
                self._receive()
            while b"\n" in self.buffer:
                command = self._read_line()
                assert command is not None
                self._fork(tracer, settings, int(command["trace"]))
            if self.commands < 0:
                return 0

    def _prepare(self, settings: dict[str, Any]) -> Any:
        """The tracer, ready to fork; None (and the reason sent) when that failed."""
        job = settings["job"]
        set_import_path(job["script"], job["module"])
        try:
            with at_work(job.get("timing") == "execute"):
                module = importlib.import_module(settings["tracer"])
                tracer = module.Tracer(module.Job(**{**job, "args": tuple(job["args"])}))
                tracer.prepare()
        except EchoError as error:
            execute = isinstance(error, ExecuteFailed)
            self._send(event="failed", status=error.exit_status, message=str(error), traceback="", execute=execute)
            return None
        except Exception as error:
            message = f"Echo could not get ready: {type(error).__name__}: {error}"
            self._send(event="failed", status=1, message=message, traceback=traceback.format_exc())
            return None
        # Frozen objects are never visited by a collection, so the children's pages stay shared with ours.
        gc.collect()
        gc.freeze()
        torch = sys.modules.get("torch")
        self._send(event="ready", python=platform.python_version(), torch=str(getattr(torch, "__version__", "")))
        return tracer

    # ---- children ----

    def _fork(self, tracer: Any, settings: dict[str, Any], rank: int) -> None:
        result = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the child has ended)
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            status = 70
            try:
                self._become_child(parent)
                trace_rank(tracer, settings, rank, result)
                status = 0
            finally:
                os._exit(status)
        with contextlib.suppress(OSError):  # the child may have done it, or be gone
            os.setpgid(pid, pid)
        self.active[pid] = _Child(rank, result, time.perf_counter())
        self._send(event="started", rank=rank, pid=pid)

    def _become_child(self, parent: int) -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        die_with_parent(signal.SIGKILL, parent)
        for end in (self.commands, self.answers, self.wake_read, self.wake_write):
            os.close(end)
        for other in self.active.values():
            other.result.close()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            child = self.active.pop(pid, None)
            if child is None:
                continue  # an adopted orphan
            kill_group(pid)  # what the script left behind: data-loader workers, its own subprocesses
            self._send(event="done", rank=child.rank, **_result(child, status))
        if not self.active:
            kill_children()  # and what had left that group

    def kill(self) -> None:
        for pid in self.active:
            kill_group(pid)
        kill_children()

    def _end(self) -> None:
        self.kill()
        os._exit(128 + signal.SIGTERM)

    # ---- lines ----

    def _send(self, **message: Any) -> None:
        data = (json.dumps(message) + "\n").encode()
        while data:
            data = data[os.write(self.answers, data) :]

    def _receive(self) -> None:
        data = os.read(self.commands, 65536)
        self.buffer += data
        if not data:
            os.close(self.commands)
            self.commands = -1

    def _read_line(self) -> dict[str, Any] | None:
        while b"\n" not in self.buffer:
            self._receive()
            if self.commands < 0:
                return None
        line, _, self.buffer = self.buffer.partition(b"\n")
        return json.loads(line)


def _result(child: _Child, status: int) -> dict[str, Any]:
    """What the child wrote down, or how it ended without writing anything."""
    seconds = time.perf_counter() - child.began
    child.result.seek(0)
    text = child.result.read()
    child.result.close()
    with contextlib.suppress(ValueError):
        return {**json.loads(text), "seconds": seconds}
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        how = f"was ended by {name}" + (" (out of host memory?)" if code == -signal.SIGKILL else "")
    else:
        how = f"left Python by itself with status {code} (os._exit)"
    return {"outcome": "crashed", "message": f"rank {child.rank}: the process {how}", "seconds": seconds}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
