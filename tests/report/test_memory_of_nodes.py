"""Host memory of the fullest node, and the problem where the node is stated to have less."""

from __future__ import annotations

import io
import json

from rich.console import Console

from echo_hooks.report.host_memory import host_memory
from echo_hooks.report.memory import print_memory
from echo_hooks.report.report import build_report, read_report

GIB = 1 << 30


def offloaded(run):
    run.roles[0].memory.host_peak_bytes, run.roles[0].memory.host_pinned_bytes = 3 * GIB, 2 * GIB
    run.roles[1].memory.host_peak_bytes = GIB
    return run


def test_ranks_of_a_node_are_added_up(run, cluster):
    assert host_memory(run, cluster) is None
    host = host_memory(offloaded(run), cluster)
    assert host == {"node": 0, "ranks": [0, 1], "peak_bytes": 4 * GIB, "pinned_bytes": 2 * GIB, "capacity_bytes": None}
    cluster.accelerators_per_node = 1
    assert host_memory(run, cluster)["peak_bytes"] == 3 * GIB


def test_the_report_shows_it_and_reads_it_back(run, composition, cluster, tmp_path):
    report = build_report(offloaded(run), composition, cluster, timings={})
    assert not [p for p in report.problems if "hosts' memory" in p["message"]]
    assert [role.host_peak_bytes for role in report.roles] == [3 * GIB, GIB]
    assert "host memory, node 0: 4.00 GiB in CPU tensors of its 2 ranks, 2.00 GiB of it page-locked" in str(report)
    path = tmp_path / "report.json"
    path.write_text(report.to_json())
    assert read_report(path).host == report.host
    value = json.loads(report.to_json())
    del value["host"]
    for role in value["roles"]:
        del role["host_peak_bytes"], role["host_pinned_bytes"]
    path.write_text(json.dumps(value))  # a report of before
    assert read_report(path).host is None


def test_a_node_with_less_is_a_problem(run, composition, cluster):
    cluster.host_memory_bytes = 3 * GIB
    report = build_report(offloaded(run), composition, cluster, timings={})
    (problem,) = [p for p in report.problems if "hosts' memory" in p["message"]]
    assert "node 0 (ranks 0-1) needs 4.00 GiB of 3.00 GiB for CPU tensors, 2.00 GiB of it" in problem["message"]
    assert (problem["kind"], problem["ranks"]) == ("out_of_memory", [0, 1])


def test_echo_sim_memory_says_it_of_a_role(run):
    out = io.StringIO()
    role = offloaded(run).roles[0]
    print_memory(role, run.traces[0], Console(file=out, width=120))
    assert "host           3.00 GiB in CPU tensors at their peak, 2.00 GiB of it page-locked" in out.getvalue()
