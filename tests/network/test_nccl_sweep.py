"""The sweep script, tried out with gloo on two processes, and its CSV read back."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from echo_hooks.network.sweep_files import read_sweeps

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu" / "nccl_sweep.py"


def test_gloo(tmp_path):
    pytest.importorskip("torch")
    out = tmp_path / "sweep.csv"
    options = ["--out", str(out), "--max-bytes", "4096", "--quick", "--protocols", "default,LL"]
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
    default = [s for s in sweeps if "(default)" in s.source]
    assert [s.collective for s in default] == [
        "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "exchange", "send",
    ]  # fmt: skip
    assert all(s.environment == () for s in default)
    forced = [s for s in sweeps if "(LL)" in s.source]
    assert [s.collective for s in forced] == ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"]
    assert all(s.environment == (("NCCL_PROTO", "LL"),) for s in forced)
    for sweep in sweeps:
        assert (sweep.ranks, sweep.nodes, sweep.dtype, sweep.clock) == (2, 1, "bfloat16", "stream")
        assert [size for size, _ in sweep.points] == [1024, 1536, 2048, 3072, 4096]


def test_kernels_of_a_size():
    """Every call has the all-reduce that lines the ranks up, then its own kernel; warm-ups do not count."""
    module = runpy.run_path(str(SCRIPT))
    durations = [x for call in range(6) for x in (-1.0, float(call))]
    assert module["by_size"](durations, 2, 3, 1) == [[1.0, 2.0], [4.0, 5.0]]
    with pytest.raises(ValueError, match="11 NCCL kernels instead of 12"):
        module["by_size"](durations[1:], 2, 3, 1)


def test_whose_time_counts():
    """A broadcast's root may be done before anyone has the data."""
    receivers = runpy.run_path(str(SCRIPT))["receivers"]
    assert [*receivers("broadcast", 4)] == [1, 2, 3]
    assert [*receivers("reduce", 4)] == [0]
    assert [*receivers("send", 2)] == [1]
    assert [*receivers("all_reduce", 3)] == [0, 1, 2]


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
