"""Execute mode end to end on the CPU: which steps count, what the program holds, what it says when it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from echo_hooks.capture.execute import CAPTURED_STEPS, LEAST_WARMUP, TIMED_STEPS

SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
assert dist.get_world_size() == 2
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 64)
for step in range({steps}):
    model(x).sum().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    optimizer.step()
    optimizer.zero_grad()
print("the script ended")
"""


def run(tmp_path: Path, steps: int, profiler: str = "CpuProfiler", rank: int = 0) -> dict:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(steps=steps))
    driver = Path(__file__).with_name("execute_on_cpu.py")
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, str(driver), str(rank), str(tmp_path / "run"), str(script), profiler],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


ALL = LEAST_WARMUP + TIMED_STEPS + 1 + CAPTURED_STEPS


def test_one_step_of_kernels_and_communication(tmp_path):
    found = run(tmp_path, ALL + 5)
    assert found["kinds"]["COLLECTIVE"] == 4
    assert sorted(found["collective_bytes"]) == [64 * 4, 64 * 4, 64 * 64 * 4, 64 * 64 * 4]
    # Forward: two products and a ReLU; backward: three products (none for x) and the ReLU's.
    names = [name for name in found["names"] if name.startswith("aten")]
    assert names.count("aten::addmm") == 2 and names.count("aten::mm") == 3
    assert names.count("aten::relu") == names.count("aten::threshold_backward") == 1
    assert found["names"][0] == "step_begin" and found["names"][-1] == "step_end"
    assert all(us > 0 for us in found["durations"]) and all(us >= 0 for us in found["host_us"])
    assert found["evidence"] == [1]  # measured
    order = [name for name in found["names"] if name]
    assert order.index("all_reduce") > order.index("aten::threshold_backward")
    assert found["phases"][found["names"].index("aten::threshold_backward")] == 1
    # Before it: the warm-up steps and the captured ones but the last; of the timed steps nothing is kept.
    assert found["collectives_before"] == 4 * (LEAST_WARMUP + CAPTURED_STEPS - 1)
    product = 2 * 8 * 64 * 64
    assert found["flops"] == {"float32 0": 2 * product, "float32 1": 3 * product}
    assert any("its own steps took" in note for note in found["notes"])
    assert set(found["host_speed"]) == {"python_us", "dispatch_us"} and min(found["host_speed"].values()) > 0


def test_the_last_step_may_be_the_scripts_last(tmp_path):
    assert run(tmp_path, ALL)["kinds"]["COLLECTIVE"] == 4


def test_a_script_that_ends_before_anything_was_captured(tmp_path):
    found = run(tmp_path, LEAST_WARMUP + 1)
    assert found["error"] == "ExecuteFailed"
    assert f"ended after {LEAST_WARMUP + 1} optimizer step(s)" in found["message"]


def test_a_profiler_that_returns_nothing(tmp_path):
    found = run(tmp_path, ALL + 1, "SilentProfiler")
    assert found["error"] == "ExecuteFailed" and "returned no kernel" in found["message"]


@pytest.mark.parametrize("rank", [1])
def test_a_later_rank_is_local_rank_0_of_the_gpu_that_measures(tmp_path, rank):
    assert any("LOCAL_RANK=0" in note for note in run(tmp_path, ALL + 1, rank=rank)["notes"])
