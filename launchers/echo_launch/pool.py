"""The launcher's end of the fork server: start it, ask for ranks, hear how they went, and leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

from echo_hooks.errors import EchoError, ExecuteFailed, ScriptError
from echo_launch.processes import kill_group

TRACER = "echo_hooks.session"
_SECONDS_TO_END = 3.0


@dataclass(frozen=True)
class Result:
    """How one rank went.

    ``outcome``: "ok", "nothing" (no optimizer step), "script_error" (for both, ``traced`` says whether a trace was
    written all the same), "echo_error" (with the exit ``status`` it asks for), "internal" or "crashed".
    """

    rank: int
    outcome: str
    message: str = ""
    traceback: str = ""
    status: int = 1
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    traced: bool = False
    packages: dict[str, str] = field(default_factory=dict)


class LocalPool:
    """Traces ranks of one job on this machine; the caller decides how many at once.

    ``job``: the fields of echo_hooks.session.Job. ``tracer``: the module that has Job and Tracer. ``shown_rank``: the
    rank whose output is not logged but shown (-1: none), its standard output on the descriptor ``stdout``. ``gpu``:
    what the ranks may see of this machine's accelerators (CUDA_VISIBLE_DEVICES). A context manager; leaving it ends
    the server and everything below it.
    """

    def __init__(
        self, job: dict[str, Any], *, tracer: str = TRACER, shown_rank: int = 0, stdout: int = 1, gpu: str = ""
    ):
        self._gpu = gpu
        self._settings = {"job": job, "tracer": tracer, "shown_rank": shown_rank, "versions_of": 0}
        self._stdout = stdout
        self._process: subprocess.Popen | None = None
        self._commands = self._answers = -1
        self._buffer = b""
        self._groups: dict[int, int] = {}  # rank -> process group
        self.versions: dict[str, str] = {}

    def __enter__(self) -> LocalPool:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _start(self) -> None:
        """Start the server and wait until it is ready; EchoError when it cannot get ready."""
        theirs_in, self._commands = os.pipe()
        self._answers, theirs_out = os.pipe()
        ends = (theirs_in, theirs_out)
        arguments = [str(number) for number in (*ends, os.getpid())]
        try:
            self._process = subprocess.Popen(
                # -P: the script's directory goes first on sys.path, and only that, as for `python script.py`.
                [sys.executable, "-u", "-P", "-m", "echo_launch.server", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._stdout,
                pass_fds=ends,
                env=_environment(self._gpu),
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which then ends the server in order
            )
        finally:
            for end in ends:
                os.close(end)
        self._send(self._settings)
        answer = self._read()
        if answer["event"] == "failed":
            if answer["traceback"]:
                raise ScriptError(answer["message"], -1, answer["traceback"])
            if answer.get("execute"):
                raise ExecuteFailed(answer["message"])
            error = EchoError(answer["message"])
            error.exit_status = answer["status"]
            raise error
        self.versions = {"python": answer["python"], "torch": answer["torch"]}

    def submit(self, rank: int) -> None:
        self._send({"trace": rank})

    def next_result(self) -> Result:
        """Wait for the next rank to end."""
        while True:
            answer = self._read()
            event = answer.pop("event")
            if event == "started":
                self._groups[answer["rank"]] = answer["pid"]
            elif event == "done":
                self._groups.pop(answer["rank"], None)
                return Result(**answer)

    def close(self) -> None:
        """End the server and all its children, by force if need be."""
        process, self._process = self._process, None
        for end in (self._commands, self._answers):
            if end >= 0:
                os.close(end)
        self._commands = self._answers = -1
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        # After an orderly end these groups are empty; a server that was killed has left them to us.
        for group in (process.pid, *self._groups.values()):
            kill_group(group)
        self._groups.clear()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            os.write(self._commands, (json.dumps(message) + "\n").encode())
        except BrokenPipeError:
            raise self._gone() from None

    def _read(self) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            select.select([self._answers], [], [])
            data = os.read(self._answers, 65536)
            if not data:
                raise self._gone()
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _gone(self) -> ScriptError:
        assert self._process is not None
        try:
            code = self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            code = 0
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return ScriptError(f"the process that traces the ranks {how}", -1)


def _environment(gpu: str) -> dict[str, str]:
    """The launcher's own, with accelerators other than ``gpu`` hidden and threads as torchrun sets them."""
    environment = dict(os.environ)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        environment[name] = gpu
    environment.setdefault("OMP_NUM_THREADS", "1")  # torchrun does the same for more than one process a node
    return environment
