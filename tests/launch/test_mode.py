"""Which mode of timing a launch gets, and what is said where it is not the one that was asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from echo_hooks.devices.gpu_lock import GpuLock, at_work
from echo_hooks.graph.rundir import read_run
from echo_hooks.mode import Gpu, choose_mode, visible
from echo_launch.main import Outcome, main

FREE = "0, GPU-aaaa, NVIDIA H200, 4, 143771"
H200 = "NVIDIA H200"
BUSY = "1, GPU-bbbb, NVIDIA H200, 90000, 143771"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Gives a function that makes this a machine with the GPUs of nvidia-smi's lines."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def with_gpus(*lines: str) -> None:
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.parent.mkdir(exist_ok=True)
        tool.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")

    return with_gpus


def test_a_free_gpu_is_used(machine):
    machine(BUSY, FREE)
    for timing in ("auto", "execute"):
        mode = choose_mode(timing, H200)
        assert (mode.timing, mode.gpu, mode.note, mode.product) == ("execute", "0", "", H200)


def test_a_gpu_of_another_kind_measures_nothing_of_the_cluster(machine):
    machine(FREE, "2, GPU-cccc, NVIDIA H100 80GB HBM3, 4, 81559")
    for timing in ("auto", "execute"):
        mode = choose_mode(timing, "NVIDIA A100-SXM4-80GB")
        assert (mode.timing, mode.gpu, mode.product) == ("profile", "", "")
        assert "this machine has NVIDIA H200 and the cluster NVIDIA A100-SXM4-80GB" in mode.note
    assert choose_mode("auto", "NVIDIA H100 80GB HBM3").gpu == "2"


@pytest.mark.parametrize("timing", ["profile", "model"])
def test_what_needs_no_gpu_sees_none(machine, timing):
    machine(FREE)
    assert (choose_mode(timing, H200).timing, choose_mode(timing, H200).gpu) == (timing, "")


def test_without_a_gpu(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert choose_mode("auto", H200).timing == "profile" and choose_mode("auto", H200).note == ""
    asked = choose_mode("execute", H200)
    assert asked.timing == "profile" and "no NVIDIA GPU" in asked.note and "instead" in asked.note


def test_a_gpu_in_use_by_others(machine):
    machine(BUSY)
    mode = choose_mode("auto", H200)
    assert mode.timing == "profile" and "in use by others (87.9 GiB and more)" in mode.note


def test_a_gpu_in_use_by_another_run_of_echo_is_shared(machine):
    machine(BUSY)
    holder = "from echo_hooks.devices.gpu_lock import GpuLock; GpuLock('1').join(); print('in', flush=True); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ)
    )
    try:
        assert other.stdout.readline() == b"in\n"
        assert choose_mode("auto", H200).timing == "execute"
    finally:
        other.communicate(b"\n")
    assert choose_mode("auto", H200).timing == "profile"


def test_visible_devices():
    gpus = [Gpu(str(i), f"GPU-{i}abc", "x", 0, 1) for i in range(3)]
    assert visible(gpus, None) == gpus
    assert visible(gpus, "2,0") == [gpus[2], gpus[0]]
    assert visible(gpus, "GPU-1a") == [gpus[1]]
    assert visible(gpus, "") == [] and visible(gpus, "0,7,1") == [gpus[0]]


def test_turns_are_taken_one_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    lock = GpuLock("9")
    lock.take_turn()
    lock.take_turn()  # again does nothing
    wait = (
        f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}\n"
        "from echo_hooks.devices.gpu_lock import GpuLock\n"
        "print('asks', flush=True); GpuLock('9').take_turn(); print('has it', flush=True)"
    )
    other = subprocess.Popen([sys.executable, "-c", wait], stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"asks\n"
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(0.3)
    lock.leave()
    assert other.communicate(timeout=20)[0] == b"has it\n"


def ask(tmp_path: Path, *calls: str) -> subprocess.Popen:
    """Another process that makes calls on a lock of its own and says when each has returned."""
    lines = [f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}"]
    lines += ["from echo_hooks.devices.gpu_lock import GpuLock", "lock = GpuLock('8'); print('asks', flush=True)"]
    lines += [f"print(lock.{call}, flush=True)" for call in calls]
    other = subprocess.Popen([sys.executable, "-c", "\n".join(lines)], stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "asks\n"
    return other


def test_nobody_is_measured_while_others_work_and_nobody_works_while_one_is(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    lock = GpuLock("9")
    lock.begin_work()
    measures = ask(tmp_path, "take_turn()", "end_turn()")  # on another GPU of the machine
    with pytest.raises(subprocess.TimeoutExpired):
        measures.wait(0.3)
    assert lock.take_turn()  # its own work ends with that; the two measure one after the other
    assert lock.take_turn()
    with pytest.raises(subprocess.TimeoutExpired):
        measures.wait(0.3)
    lock.end_turn()
    lock.leave()
    assert measures.communicate(timeout=20)[0] == "True\nNone\n"

    assert lock.take_turn()
    works = ask(tmp_path, "begin_work()")
    with pytest.raises(subprocess.TimeoutExpired):
        works.wait(0.3)
    lock.leave()
    assert works.communicate(timeout=20)[0] == "None\n"


def test_patience_with_others_at_work_has_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("echo_hooks.devices.gpu_lock.QUIET_WAIT_S", 0.1)
    measured = GpuLock("9")
    with at_work(True):
        assert not measured.take_turn()
    with at_work(False):
        assert GpuLock("7").take_turn()
    measured.leave()


# ---- a whole launch ----


def launch(script: dict, *words: str) -> int:
    Path("job.py").write_text(json.dumps(script))
    return main(
        ["--simulate", *words, "job.py"],
        tracer="fake_tracer",
        finish=lambda _run, _launch: Outcome([], lambda console: None, lambda: "{}\n"),
    )


def test_the_ranks_see_the_chosen_gpu(machine, capfd):
    machine(FREE)
    words = ("--world-size", "2", "--cluster", "h200-sxm:1x2", "--out", "run")
    assert launch({"everyone": "show"}, *words, "--timing", "execute") == 0
    assert json.loads(capfd.readouterr().out.splitlines()[1])["devices"] == "0"
    manifest = read_run("run").manifest
    assert (manifest["timing"], manifest["executed_on"]) == ("execute", H200)


@pytest.mark.parametrize(
    ("behaviour", "why"), [("no room", "does not fit into this GPU's memory"), ("no CUDA", "built without CUDA")]
)
def test_what_cannot_be_run_here_is_priced_instead_and_said(machine, capfd, behaviour, why):
    machine(FREE)
    words = ("--world-size", "2", "--cluster", "h200-sxm:1x2", "--out", "run")
    assert launch({"everyone": behaviour}, *words) == 0
    manifest = read_run("run").manifest
    assert manifest["timing"] == "profile"
    assert any(why in sentence for sentence in manifest["assumptions"])
    assert why in capfd.readouterr().err
