"""The sweep script, tried out with gloo on two processes, and its CSV read back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from echo_hooks.network.sweep_files import read_sweeps

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu" / "nccl_sweep.py"


def test_gloo(tmp_path):
    pytest.importorskip("torch")
    out = tmp_path / "sweep.csv"
    options = ["--out", str(out), "--max-bytes", "4096", "--min-bytes", "1024", "--calls", "3", "--warmup", "1"]
    store = tmp_path / "store"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _AS_RANK, str(SCRIPT), f"file://{store}", *options],
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""},
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    sweeps = read_sweeps(out)
    assert {s.collective for s in sweeps} == {"all_reduce", "all_gather", "broadcast", "reduce", "exchange", "send"}
    for sweep in sweeps:
        assert (sweep.ranks, sweep.nodes, sweep.dtype, sweep.clock) == (2, 1, "bfloat16", "stream")
        assert [size for size, _ in sweep.points] == [1024, 1536, 2048, 3072, 4096]


# A file store instead of torchrun's port, which another test might hold.
_AS_RANK = """
import os, runpy, sys
import torch.distributed as dist
script, store, *sys.argv[1:] = sys.argv[1:]
init = dist.init_process_group
dist.init_process_group = lambda backend: init(
    backend, init_method=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
)
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
"""
