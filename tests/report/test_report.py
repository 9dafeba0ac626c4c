"""report.json: every number of the hand-built run, and reading it back."""

from __future__ import annotations

import json

import pytest

from echo_hooks.compose.result import Band, Composition
from echo_hooks.errors import UsageError
from echo_hooks.graph.problems import Problem
from echo_hooks.report.report import NO_BAND, build_report, read_report

MIB = 1 << 20
KEYS = ["format", "step_time_ms", "step_time_p10_ms", "step_time_p90_ms", "world_size", "cluster"]
KEYS += ["tokens_per_second", "model_flops_per_step", "mfu", "breakdown", "roles", "evidence", "assumptions"]
KEYS += ["problems", "timings", "moe", "host"]


@pytest.fixture
def report(run, composition, cluster):
    return build_report(run, composition, cluster, timings={"report": 0.5})


def test_top_level(report):
    value = json.loads(report.to_json())
    assert list(value) == KEYS
    assert value["step_time_ms"] == pytest.approx(0.46)
    assert value["step_time_p10_ms"] is None and value["step_time_p90_ms"] is None
    assert value["world_size"] == 2
    assert value["cluster"]["name"] == "tiny:1x2"
    assert value["tokens_per_second"] == pytest.approx(4600 / 460e-6)
    assert value["timings"] == {"trace": 3.0, "compose": 0.25, "report": 0.5}
    assert value["evidence"] == {"measured": 0.1, "profiled": 0.0, "modelled": 0.9, "assumed": 0.0}


def test_flops_and_mfu(report):
    # two ranks, each 2e9 forward and 4e9 backward, against 1e15 bfloat16 FLOP/s per accelerator
    assert report.model_flops_per_step == 12 * 10**9
    assert report.mfu == pytest.approx(12e9 / (460e-6 * 2 * 1e15))


def test_breakdown_of_the_critical_rank_sums_to_the_step(report):
    breakdown = report.breakdown
    assert breakdown["compute"] == pytest.approx(0.35)
    assert breakdown["exposed_communication"] == {"dp": pytest.approx(0.09), "pp": 0.0}
    assert (breakdown["bubble"], breakdown["waiting"]) == (0.0, 0.0)
    exposed = breakdown["exposed_communication"].values()
    assert sum(exposed) + sum(breakdown[k] for k in ("compute", "bubble", "waiting", "host")) == pytest.approx(0.46)


def test_roles(report):
    first, last = report.roles
    assert (first.name, first.ranks, first.traced_rank, first.critical, first.busiest_rank) == (
        "stage 0",
        [0],
        0,
        True,
        0,
    )
    assert (last.critical, last.busiest_rank) == (False, 1)
    assert last.step_time_ms == pytest.approx(0.46)
    assert last.breakdown["bubble"] == pytest.approx(0.115)
    assert (first.needed_bytes, first.fits) == (90 * MIB, True)
    assert (last.needed_bytes, last.fits) == (150 * MIB, False)


def test_exactly_full_fits(run, composition, cluster):
    cluster.accelerator.memory_bytes = 150 * MIB
    assert build_report(run, composition, cluster, timings={}).roles[1].fits


def test_out_of_memory_is_a_problem(report):
    (problem,) = report.problems
    assert (problem["kind"], problem["ranks"]) == ("out_of_memory", [1])
    assert problem["message"] == (
        "stage 1 (rank 1) needs 150 MiB of 128 MiB: 140 MiB reserved by the allocator, context 10.0 MiB;"
        " most at the peak is held by parameters (40.0 MiB); the peak is in backward"
    )


def test_assumptions_are_merged_over_ranks(run, composition, cluster):
    run.traces[1].assumptions = run.traces[0].assumptions
    made_up = [a for a in build_report(run, composition, cluster, timings={}).assumptions if a["kind"] != "note"]
    assert made_up == [
        {"kind": "item of unknown float", "value": "1.0", "site": "train.py:50", "count": 6, "ranks": [0, 1]}
    ]


@pytest.mark.parametrize("tokens", ["many", 0, -1, None, 1.5])
def test_tokens_that_are_no_count_are_unknown(run, composition, cluster, tokens):
    run.manifest["tokens_per_step"] = tokens
    assert build_report(run, composition, cluster, timings={}).tokens_per_second is None


def test_notes_say_what_is_not_known(run, composition, cluster):
    del run.manifest["tokens_per_step"]
    run.roles[0].proven = ()
    run.roles[0].memory.extra = run.roles[1].memory.extra = {}
    run.roles[0].ranks = (0, 2)
    report = build_report(run, composition, cluster, timings={})
    notes = [a["value"] for a in report.assumptions if a["kind"] == "note"]
    assert report.tokens_per_second is None
    assert "not traced, but assumed to run their role's program: rank 2" in notes
    assert any(note.startswith("needed memory leaves out context") for note in notes)
    assert NO_BAND in notes
    assert notes.count("the tokenizer was read from the cache") == 1


def test_recomputation_shows_in_the_notes(run, composition, cluster):
    program = run.traces[0].program
    program.columns["phase"][program.kind == 0] = 1  # all matrix products of rank 0 in backward: 10 against 2
    notes = [a["value"] for a in build_report(run, composition, cluster, timings={}).assumptions]
    assert any("backward has 5.0 times the FLOPs of forward" in note and "HFU" in note for note in notes)


def test_no_peak_for_the_dtype_gives_no_mfu(run, composition, cluster):
    del cluster.accelerator.peak_flops["bfloat16"]
    report = build_report(run, composition, cluster, timings={})
    assert report.mfu is None
    assert report.model_flops_per_step == 12 * 10**9
    assert any(a["value"] == "no MFU: tiny states no peak for bfloat16" for a in report.assumptions)


def test_several_traced_steps_count_as_one(run, composition, cluster):
    for trace in run.traces.values():
        trace.steps = 2
    assert build_report(run, composition, cluster, timings={}).model_flops_per_step == 6 * 10**9


def test_a_hang_has_no_times(run, cluster):
    hang = Problem("hang", "rank 0 waits for rank 1", (0, 1), "train.py:42")
    report = build_report(run, Composition(float("nan"), problems=[hang]), cluster, timings={})
    value = json.loads(report.to_json())
    assert value["step_time_ms"] is None and value["mfu"] is None and value["breakdown"] is None
    assert value["evidence"] == {}
    assert value["problems"][0] == {
        "kind": "hang",
        "message": "rank 0 waits for rank 1",
        "ranks": [0, 1],
        "site": "train.py:42",
    }


def test_read_back(report, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(report.to_json())
    assert read_report(path) == report


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"roles": None},
        {"roles": [{}]},
        {"breakdown": {"compute": "x"}},
        {"step_time_ms": "fast"},
        {"evidence": []},
        {"problems": [1]},
        {"assumptions": [{}]},
        {"timings": {"trace": "long"}},
        {"cluster": {}},
    ],
)
def test_a_damaged_report_is_refused(report, tmp_path, change):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(json.loads(report.to_json()) | change))
    with pytest.raises(UsageError, match=r"report\.json: "):
        read_report(path)


def test_a_truncated_report_is_refused(report, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(report.to_json()[:500])
    with pytest.raises(UsageError, match="not valid JSON"):
        read_report(path)


def test_band(run, composition, cluster):
    composition.band = Band(450.0, 462.0, 480.0, "of 32 simulations")
    report = build_report(run, composition, cluster, timings={})
    assert (report.step_time_p10_ms, report.step_time_p90_ms) == (0.45, 0.48)
    assert "of 32 simulations" in [a["value"] for a in report.assumptions if a["kind"] == "note"]
    assert "460 us  (simulated; P10 to P90 450 us to 480 us, see notes)" in str(report)
