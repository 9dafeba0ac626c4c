"""A real run under torchrun with its record: the script notices nothing, and the record says what it did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from echo_hooks.errors import UsageError
from echo_hooks.graph.record import RecordedRank, read_record
from echo_launch.directory import RecordDirectory
from echo_launch.recording import Recording

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(12):
    for _ in range(2):
        model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.step()  # as ZeRO steps each parameter group
    optimizer.zero_grad()
    time.sleep(0.01)
if dist.get_rank() == 0:
    print(sys.argv, sys.path[0], __name__, sorted(k for k in os.environ if k.startswith("ECHO")))
"""


def launch(directory: Path, *words: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "echo_launch", *words]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, env=variables, timeout=120)


def test_two_ranks_with_a_profile(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = launch(tmp_path, "--nproc-per-node=2", "--profile", "2", "train.py", "--record", "mine")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{['train.py', '--record', 'mine']} {tmp_path} __main__ []\n"
    assert "recorded 2 of 2 ranks" in done.stderr and "echo-sim compare RUN echo-runs/train-001" in done.stderr
    ranks = read_record(tmp_path / "echo-runs" / "train-001")
    assert [(r.rank, r.world_size, r.ended, r.device) for r in ranks] == [(0, 2, True, "cpu"), (1, 2, True, "cpu")]
    # 12 steps are 11 intervals; the profile begins with the fourth boundary, leads in with one and takes two; the
    # intervals beside it hold its own time.
    assert ranks[0].steps == 2 + 4 and ranks[0].clock == "host"
    assert ranks[0].step_ms >= 10.0  # what it sleeps
    assert ranks[1].traces == ["traces/rank00001.json.gz"]
    assert ranks[0].versions["torch"] == torch.__version__ and ranks[0].peak_host_bytes > 50 << 20


def test_a_failing_script_fails_as_under_torchrun(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("import sys\nprint(sys.argv[1:])\nraise ValueError('boom')\n")
    done = launch(tmp_path, "-m", "--record=kept", "package.train", "-x")
    assert done.returncode == 1 and done.stdout == "['-x']\n"
    assert "package.train FAILED" in done.stderr and "ValueError: boom" in done.stderr
    assert "recorded.py" not in done.stderr and "runner.py" not in done.stderr
    assert read_record(tmp_path / "kept")[0].notes == ["no step of a torch.optim optimizer was seen"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--no-python", sys.executable, "-c", "print('ran')"], "--no-python starts a program"),
        (["job"], "job is no file of Python source"),
        (["--record", "full", "job/__main__.py"], "holds files already"),
    ],
)
def test_what_cannot_be_recorded_runs_all_the_same(tmp_path, words, says):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "__main__.py").write_text("print('ran')")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    done = launch(tmp_path, *words)
    assert says in done.stderr
    refused = "--record" in words  # before anything has started
    assert (done.returncode, done.stdout) == ((2, "") if refused else (0, "ran\n"))


# ---- steps, in this process ----


@pytest.fixture
def recording(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    recording = Recording(str(tmp_path), "train.py", [], 0)
    before = dict(torch.optim.Optimizer.__init__.__globals__["_global_optimizer_post_hooks"])
    recording._install(torch)
    yield recording
    hooks = torch.optim.Optimizer.__init__.__globals__["_global_optimizer_post_hooks"]
    for key in set(hooks) - set(before):
        del hooks[key]


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(3))


def step(weight: torch.nn.Parameter, *optimizers: torch.optim.Optimizer) -> None:
    (weight * 2).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def test_calls_in_a_row_are_one_step(recording):
    weight = parameter()
    optimizer = torch.optim.SGD([weight])
    for _ in range(5):
        step(weight, optimizer, optimizer, optimizer)
    assert recording.steps == 4


def test_the_optimizer_that_stepped_first_counts(recording):
    weight, other = parameter(), parameter()
    first, second = torch.optim.SGD([weight]), torch.optim.Adam([other])
    for _ in range(4):
        step(weight, first)
        step(other, second)
        step(other, second)
    assert recording.steps == 3


def test_a_second_training_with_a_new_optimizer_goes_on(recording):
    weight = parameter()
    step(weight, torch.optim.SGD([weight]))
    optimizer = torch.optim.SGD([weight])
    step(weight, optimizer)
    step(weight, optimizer)
    assert recording.steps == 2


def test_a_compiled_step_is_left_alone(recording, capfd):
    weight = parameter()
    optimizer = torch.optim.SGD([weight])
    compiled = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        (weight * 2).sum().backward()
        compiled()
    assert recording.steps in (0, 2)  # torch.compile may leave the loop over hooks out of its graph, or take it in
    assert weight.tolist() != [1.0, 1.0, 1.0] and "echo-launch" not in capfd.readouterr().err


def test_a_fault_of_the_record_is_one_line(recording, capfd, monkeypatch):
    monkeypatch.setattr("echo_launch.recording.write_json", lambda *_: 1 / 0)
    weight = parameter()
    optimizer = torch.optim.SGD([weight])
    for _ in range(8):
        step(weight, optimizer)
    err = capfd.readouterr().err
    assert err == "echo-launch: rank 0: the record ends here: ZeroDivisionError: division by zero\n"


def test_device_steps_come_from_events(recording, monkeypatch):
    class FakeEvent:
        clock = 0.0

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            FakeEvent.clock += 5.0
            self.at = FakeEvent.clock

        def query(self):
            return self.at < FakeEvent.clock  # the last one is still running

        def elapsed_time(self, other):
            return other.at - self.at

    class Cuda:
        Event = FakeEvent
        is_current_stream_capturing = staticmethod(lambda: False)
        memory_stats = staticmethod(lambda: {"allocated_bytes.all.peak": 7, "reserved_bytes.all.peak": 9})
        get_device_name = staticmethod(lambda: "NVIDIA H200")
        nccl = type("nccl", (), {"version": staticmethod(lambda: (2, 28, 9))})

    monkeypatch.setattr("echo_launch.recording._cuda", lambda: Cuda)
    weight = parameter()
    optimizer = torch.optim.SGD([weight])
    for _ in range(8):
        step(weight, optimizer)
    assert list(recording.step_times_ms) == [5.0] * 6
    (read,) = read_record(recording.directory)
    assert (read.clock, read.device, read.peak_allocated_bytes, read.peak_reserved_bytes) == (
        "device",
        "NVIDIA H200",
        7,
        9,
    )
    assert read.versions["nccl"] == "2.28.9" and not read.ended


# ---- reading ----


def test_the_median_leaves_out_the_first_steps():
    assert RecordedRank(0, 1, [100.0, 1.0, 2.0, 3.0, 4.0]).step_ms == 2.5
    assert RecordedRank(0, 1, [7.0]).step_ms == 7.0
    assert RecordedRank(0, 1, []).step_ms is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 2}, "this Echo reads 1"),
        ({"rank": 3}, "rank 3 of 2"),
        ({"step_times_ms": ["x"]}, "list of milliseconds"),
        ({"step_times_ms": None}, "list of milliseconds"),
    ],
)
def test_a_damaged_record_is_one_sentence(tmp_path, change, says):
    (tmp_path / "ranks").mkdir()
    value = {"format": 1, "rank": 0, "world_size": 2, "step_times_ms": [1.0], **change}
    (tmp_path / "ranks" / "00000.json").write_text(json.dumps(value))
    with pytest.raises(UsageError, match=says):
        read_record(tmp_path)


def test_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = RecordDirectory(None, "train.py")
    assert directory.path == tmp_path / "echo-runs" / "train-001"
    directory.leave()
    assert not (tmp_path / "echo-runs").exists()
    (tmp_path / "shared" / "ranks").mkdir(parents=True)
    RecordDirectory(Path("shared"), "train.py", shared=True)  # another node of the run came first
    with pytest.raises(UsageError, match="holds files already"):
        RecordDirectory(Path("shared"), "train.py")
