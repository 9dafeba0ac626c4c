"""analyse(): a run in which nothing was measured is an error, never a report without times and without a reason."""

import numpy as np
import pytest

from echo_hooks.analysis import analyse
from echo_hooks.errors import UsageError
from echo_hooks.graph.ops import OpSignature
from echo_hooks.graph.program import Kind
from echo_hooks.graph.recorder import Recorder
from echo_hooks.graph.roles import Role
from echo_hooks.graph.rundir import RankTrace, Run
from echo_hooks.hardware.cluster import load_cluster


def idle(rank: int, call: str) -> RankTrace:
    """A rank that made one collective and no step."""
    recorder = Recorder(rank, 2)
    recorder.groups.add((0, 1), name="world")
    recorder.communication(
        Kind.COLLECTIVE,
        OpSignature(call, attrs=(("reduce", "sum"),) if call == "all_reduce" else ()),
        group=0,
        bytes=4,
        dtype="float32",
        seq=0,
        peer=0 if call == "broadcast" else -1,
        site=f"train.py:{rank + 1}",
    )
    whole = recorder.program.program()
    events = {"record": np.zeros(0), "storage": np.zeros(0), "bytes": np.zeros(0)}
    empty = whole.slice(1, 1)
    return RankTrace(rank, empty, whole, recorder.ops.signatures, recorder.groups, events, steps=0)


def run_of(tmp_path, calls: list[str]) -> Run:
    traces = {rank: idle(rank, call) for rank, call in enumerate(calls)}
    roles = [Role(f"rank {rank}", rank, (rank,), (rank,)) for rank in traces]
    return Run(tmp_path, {"world_size": 2, "cluster": "h100-sxm:1x2"}, traces[0].groups, roles, traces)


def test_no_measured_step_is_an_error(tmp_path):
    run = run_of(tmp_path, ["all_reduce", "all_reduce"])
    with pytest.raises(UsageError, match="holds no measured step"):
        analyse(run, load_cluster("h100-sxm:1x2"))


def test_calls_that_do_not_match_are_the_reason(tmp_path):
    run = run_of(tmp_path, ["all_reduce", "broadcast"])
    analysis = analyse(run, load_cluster("h100-sxm:1x2"))
    (problem,) = analysis.report.problems
    assert problem["kind"] == "mismatch"
    assert "train.py:1" in problem["message"] and "train.py:2" in problem["message"]
    assert analysis.report.step_time_ms is None


def test_what_no_tensor_holds_counts_for_the_fit(tmp_path):
    """Two ranks of H100 with one communicator: 703 MiB of context, NCCL's 354, and what a communicator takes."""
    run = run_of(tmp_path, ["all_reduce", "broadcast"])
    run.roles[0].memory.peak_reserved_bytes = (80 << 30) - (1 << 30)
    report = analyse(run, load_cluster("h100-sxm:1x2")).report
    role = report.roles[0]
    assert role.extra_bytes["communicator world"] > 12 << 20
    assert role.extra_bytes.items() >= {"context": 703 << 20, "NCCL": 354 << 20}.items() and len(role.extra_bytes) == 3
    assert role.needed_bytes == role.peak_reserved_bytes + sum(role.extra_bytes.values())
    assert not role.fits and any(p["kind"] == "out_of_memory" for p in report.problems)
    assert any("703 MiB" in a["value"] for a in report.assumptions)
    assert "left out" not in " ".join(a["value"] for a in report.assumptions if "needed memory" in a["value"])


def test_what_ran_on_one_accelerator_is_not_told_of_another(tmp_path):
    run = run_of(tmp_path, ["all_reduce", "broadcast"])
    run.manifest |= {"timing": "execute", "executed_on": "NVIDIA H200"}
    with pytest.raises(UsageError, match="executed on NVIDIA H200, whose times say nothing about NVIDIA H100"):
        analyse(run, load_cluster("h100-sxm:1x2"))
    assert analyse(run, load_cluster("h200-sxm:1x2")).report.problems
