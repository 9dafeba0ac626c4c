"""echo.simulate() around a loop in a process of the user's own, against echo-launch on the same loop."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from echo_hooks.analysis import analyse
from echo_hooks.graph.program import COLUMNS
from echo_hooks.graph.rundir import read_run
from echo_hooks.hardware.cluster import load_cluster
from echo_launch.main import main

CASES = Path(__file__).parent


@pytest.fixture(scope="module")
def facts(here):
    command = [sys.executable, str(CASES / "inside_simulate.py"), str(here / "simulated")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("FACTS"))
    return json.loads(line.removeprefix("FACTS"))


@pytest.fixture(scope="module")
def launched(here):
    """Run directories of two launches of the same script."""
    for name in ("one", "two"):
        words = ["--simulate", "--world-size", "8", "--quiet", "--json", "--out", name, str(CASES / "ddp_loop.py")]
        assert main(words) == 0
    return here / "one", here / "two"


def report_of(directory: Path) -> dict:
    return json.loads((directory / "report.json").read_text())


# ---- the block ----


def test_nothing_of_echo_stays_behind(facts):
    assert facts["changed"] == []
    assert facts["environment"] == []
    assert facts["initialised"] is False


def test_an_error_of_the_block_passes_through_and_the_hooks_are_out(facts):
    assert facts["raised"] == repr("the script's own")
    assert facts["changed by error"] == []
    assert facts["environment after error"] is True
    assert facts["changed at last"] == []


@pytest.mark.parametrize(
    "misuse, sentence",
    [
        ("world 0", "UsageError: world_size is 0, should be at least 1"),
        ("steps 0", "UsageError: steps is 0"),
        ("unknown cluster", "UsageError: "),
        ("small cluster", "UsageError: cluster h100-sxm:1x8 has 8 accelerators, world_size is 64"),
        ("early", "UsageError: no step was recorded"),
        ("inside", "UsageError: no step was recorded"),
        ("nested", "UsageError: echo.simulate() is active already"),
        ("dist initialised", "UsageError: torch.distributed is initialised already"),
        ("nothing", "NothingSimulated: rank 0: the script ended after 0 optimizer step(s)"),
        ("point to point", "UsageError: this program sends to or receives from other ranks"),
    ],
)
def test_misuse_is_one_sentence(facts, misuse, sentence):
    assert facts[misuse].startswith(sentence)
    assert "\n" not in facts[misuse]


def test_the_report(facts):
    assert facts["same report"] is True
    report = facts["report"]
    assert report["world_size"] == 8 and report["step_time_ms"] > 0
    (role,) = report["roles"]
    assert (
        role["traced_rank"] == 0 and role["peak_allocated_bytes"] > 4 * 4 * 4096**2 * 4
    )  # weights, moments, gradients


# ---- the same as the command line ----


def test_the_step_time_is_that_of_the_command_line(facts, launched):
    # Host times differ from run to run; the device sets the pace here.
    assert facts["report"]["step_time_ms"] == pytest.approx(report_of(launched[0])["step_time_ms"], rel=0.02)
    assert facts["report"]["breakdown"]["host"] < 0.05 * facts["report"]["step_time_ms"]


def columns(trace, *without):
    """Columns of the measured program, indices replaced by what they stand for."""
    program = trace.program
    result = {name: program.columns[name] for name in COLUMNS if name not in without}
    result["op"] = np.array([repr(trace.ops[i]) if i >= 0 else "" for i in program.op])
    for name in ("dtype", "module", "site"):
        # The main script is another one: its frame, which `site` adds in brackets, is no part of the comparison.
        result[name] = np.array([program.strings[i].split(" (from ")[0] for i in program.columns[name]])
    return result


def same(one, other, *without):
    a, b = columns(one, *without), columns(other, *without)
    return [name for name in a if not np.array_equal(a[name], b[name], equal_nan=a[name].dtype.kind == "f")]


def test_the_program_is_that_of_the_command_line(facts, here, launched):
    simulated = read_run(here / "simulated").traces[0]
    one = read_run(launched[0]).traces[0]
    assert same(simulated, one, "host_us", "duration_us", "evidence") == []
    groups = [[(g.name, g.ranks, g.backend, g.family) for g in trace.groups.groups] for trace in (simulated, one)]
    assert groups[0] == groups[1] and simulated.memory == one.memory


# ---- the same twice ----


def test_two_runs_differ_in_host_times_alone(launched):
    one, two = launched
    for name in ("groups.parquet", "roles.json"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    files = sorted(path.name for path in (one / "ranks").iterdir())
    assert files == sorted(path.name for path in (two / "ranks").iterdir())
    for name in files:
        if name.endswith((".ops.parquet", ".memory.parquet")):
            assert (one / "ranks" / name).read_bytes() == (two / "ranks" / name).read_bytes(), name
    first, second = read_run(one), read_run(two)
    assert sorted(first.traces) == sorted(second.traces)
    for rank, trace in first.traces.items():
        assert same(trace, second.traces[rank], "host_us") == []
        assert trace.assumptions == second.traces[rank].assumptions


# ---- other clusters ----


def test_a_larger_cluster_exposes_more_communication(here, launched):
    words = ["--simulate", "--world-size", "128", "--cluster", "h100-sxm:16x8", "--quiet", "--out", "large"]
    assert main([*words, str(CASES / "ddp_loop.py")]) == 0
    small, large = report_of(launched[0]), report_of(here / "large")
    exposed = [sum(report["breakdown"]["exposed_communication"].values()) for report in (small, large)]
    assert exposed[0] < exposed[1]
    assert small["step_time_ms"] < large["step_time_ms"]


def test_a_slower_link_never_makes_a_shorter_step(launched):
    cluster = load_cluster("h100-sxm:4x2")
    accelerator = cluster.accelerator
    times = []
    for part in (1, 2, 5, 20):  # of the nominal bandwidth
        links = accelerator.scaleup_bandwidth_bytes_per_s / part
        slower = replace(
            cluster,
            accelerator=replace(accelerator, scaleup_bandwidth_bytes_per_s=links),
            nic_bandwidth_bytes_per_s=cluster.nic_bandwidth_bytes_per_s / part,
        )
        times.append(analyse(read_run(launched[0]), slower).composition.step_time_us)
    assert times == sorted(times) and times[0] < times[-1]
