"""However the launcher ends, nothing that it started goes on, and nothing half-written looks like a run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="relies on prctl")
FAKE = Path(__file__).parent / "launch_fake.py"


def until(condition, seconds: float = 30.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return found


@pytest.fixture
def hanging(tmp_path):
    """A launcher whose rank 7 sleeps, with helpers in and out of its process group; and all processes below it."""
    ready = tmp_path / "ready"
    script = tmp_path / "job.py"
    script.write_text(json.dumps({"behaviour": {"7": "sleep"}, "ready": str(ready)}))
    words = ["--simulate", "--world-size", "8", "--jobs", "1", "--out", "run", str(script)]
    process = subprocess.Popen([sys.executable, str(FAKE), *words], stderr=subprocess.PIPE, text=True)
    tree: list[psutil.Process] = []
    try:
        until(lambda: ready.exists() and ready.read_text())
        tree = psutil.Process(process.pid).children(recursive=True)
        assert len(tree) == 4  # server, rank 7, two helpers
        yield process, tree
    finally:
        for each in [*tree, process]:
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                each.kill()
        process.wait()
        process.stderr.close()


def assert_gone(tree):
    def alive():
        return [p for p in tree if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    until(lambda: not alive(), seconds=10)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_everything_in_order(hanging, number):
    process, tree = hanging
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert f"ended by {number.name}" in err and "unfinished" in err
    assert_gone(tree)
    assert not Path("run/manifest.json").exists()


def test_a_second_ctrl_c_does_not_stop_the_first(hanging):
    process, tree = hanging
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert_gone(tree)


def test_a_killed_launcher_leaves_no_process(hanging):
    process, tree = hanging
    process.kill()
    assert_gone(tree)
    assert not Path("run/manifest.json").exists()


def test_a_killed_server_ends_the_launcher_with_a_sentence(hanging):
    process, tree = hanging
    server = next(p for p in tree if "echo_launch.server" in p.cmdline())
    rank = next(p for p in server.children() if p.cmdline() == server.cmdline())
    in_group = [p for p in rank.children() if os.getpgid(p.pid) == rank.pid]
    assert len(in_group) == 1
    server.kill()
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "the process that traces the ranks was ended by SIGKILL" in err
    assert_gone([server, rank, *in_group])


def test_a_signal_while_the_server_gets_ready_leaves_nothing(tmp_path):
    script = tmp_path / "job.py"
    script.write_text("{}")
    words = ["--simulate", "--world-size", "8", "--out", "run", str(script)]
    process = subprocess.Popen([sys.executable, str(FAKE), *words], stderr=subprocess.PIPE, text=True)
    tree = until(lambda: psutil.Process(process.pid).children(recursive=True))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143
    assert_gone(tree)
    assert not Path("run").exists()
