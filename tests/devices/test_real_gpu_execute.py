"""Execute mode on a real GPU (skipped without one): whole launches of a small script, beside its own step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from echo_hooks.graph.program import Evidence, Kind
from echo_hooks.graph.rundir import read_run

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.slow]

SCRIPT = """
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("nccl")
torch.cuda.set_device(0)
torch.manual_seed(0)
layers = [m for _ in range(4) for m in (torch.nn.Linear(4096, 4096), torch.nn.GELU())]
model = torch.nn.Sequential(*layers).cuda().bfloat16()
x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
if "{how}" == "graphed":
    model = torch.cuda.make_graphed_callables(model, (x.clone().requires_grad_(),))
model = DistributedDataParallel(model, device_ids=[0])
if "{how}" == "compiled":
    model = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
times = []
for step in range(30):
    torch.cuda.synchronize()
    began = time.perf_counter()
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    times.append(time.perf_counter() - began)
    if step == 0:  # NCCL keeps what finished calls worked on until its watchdog looks, every 100 ms
        time.sleep(0.5)
print("MEASURED", sorted(times)[15] * 1e3, torch.cuda.max_memory_allocated())
"""


def simulated(tmp_path: Path, world: int, how: str = "eager") -> tuple[dict, Path]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(how=how))
    command = [sys.executable, "-m", "echo_launch", "--simulate", "--world-size", str(world), "--json", "--quiet"]
    command += ["--timing", "execute", "--trace-ranks", "all", "--out", str(tmp_path / "run"), str(script)]
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), tmp_path / "run"


@pytest.mark.parametrize("how", ["eager", "compiled", "graphed"])
def test_a_step_of_one_rank_is_the_real_one(tmp_path, how):
    report, _ = simulated(tmp_path, 1, how)
    names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "train.py")], capture_output=True, text=True, env={**os.environ, **names}
    )
    words = next(line for line in done.stdout.splitlines() if line.startswith("MEASURED")).split()
    assert report["step_time_ms"] == pytest.approx(float(words[1]), rel=0.12)
    assert report["roles"][0]["peak_allocated_bytes"] == pytest.approx(int(words[2]), rel=0.02)


def test_two_ranks_measured_one_after_the_other(tmp_path):
    report, out = simulated(tmp_path, 2)
    run = read_run(out)
    assert run.manifest["timing"] == "execute" and run.manifest["traced_ranks"] == [0, 1]
    program = run.traces[0].program
    kernels = program.kind == Kind.COMPUTE
    assert (program.evidence[kernels] == Evidence.MEASURED).all() and kernels.sum() > 20
    assert (program.kind == Kind.COLLECTIVE).any()
    assert report["mfu"] > 0.1
