"""Real runs beside simulated ones: hand-made traces and records, whole, damaged and incomplete."""

from __future__ import annotations

import gzip
import json

import pytest

from echo_hooks.errors import UsageError
from echo_hooks.graph.groups import GroupTable
from echo_hooks.report.comparison import compare
from echo_hooks.report.measured import read_measured
from echo_hooks.report.measured_trace import CallTimes, kernel_class, read_traces
from echo_hooks.report.report import build_report
from echo_launch.sim import main

ALL_REDUCE = {
    "Collective name": "allreduce",
    "Process Group Name": "0",
    "Process Group Description": "mesh_dp",
    "Process Group Ranks": "[0, 1]",
    "In msg nelems": 1024,
    "Out msg nelems": 1024,
    "dtype": "BFloat16",
}


class Steps:
    """A rank's trace: events of the device from 1,000 us on; one step of 400 us between ProfilerStep marks."""

    def __init__(self, rank: int | None = 0):
        self.header = {"schemaVersion": 1}
        if rank is not None:
            self.header["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 2}
        self.events: list[dict] = []
        self.mark(900, 1000)
        self.mark(1000, 1400)

    def mark(self, begin, end):
        name = f"ProfilerStep#{len(self.events)}"
        self.events.append({"ph": "X", "cat": "user_annotation", "name": name, "ts": begin, "dur": end - begin})

    def add(self, name, begin, end, cat="kernel", **args):
        args = {"stream": 7, "correlation": len(self.events), **args}
        event = {"ph": "X", "cat": cat, "name": name, "ts": 1000 + begin, "dur": end - begin, "args": args}
        self.events.append(event)

    def text(self) -> str:
        return json.dumps({**self.header, "traceEvents": self.events, "traceName": "t"})

    def write(self, path, text=None):
        text = (text if text is not None else self.text()).encode("latin-1")
        path.write_bytes(gzip.compress(text) if path.name.endswith(".gz") else text)
        return path


def two_ranks() -> list[Steps]:
    """A GEMM of 100 us on each; an all-reduce behind it that moves 50 us, for which rank 0 waits 60; a SendRecv that
    moves 10 us, for which rank 1 waits 20; copies of 30 us beside it."""
    first, second = Steps(0), Steps(1)
    first.add("nvjet_sm90_tst_128x256", 0, 100)
    first.add("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 100, 210, **ALL_REDUCE)
    first.add("ncclDevKernel_SendRecv", 250, 260)
    first.add("Memcpy HtoD", 245, 275, cat="gpu_memcpy")
    second.add("nvjet_sm90_tst_128x256", 60, 160)
    second.add("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 160, 210, **ALL_REDUCE)
    second.add("ncclDevKernel_SendRecv", 230, 260)
    return [first, second]


def written(tmp_path, traces: list[Steps], suffix=".json.gz"):
    return [trace.write(tmp_path / f"t{i}{suffix}") for i, trace in enumerate(traces)]


def read(paths, name_of=lambda label, ranks: label):
    return read_traces(paths, name_of)


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_two_ranks(tmp_path, suffix):
    ranks, step_ms, told = read(written(tmp_path, two_ranks(), suffix))
    assert told == [] and step_ms == 0.4 and [r.rank for r in ranks] == [0, 1]
    first, second = ranks
    assert first.classes == {"matrix products": 0.1, "copies": 0.03}
    assert first.communication == {
        ("mesh_dp", "all_reduce"): CallTimes(1.0, 0.05, 0.06),
        ("", "send/recv"): CallTimes(1.0, 0.01, 0.0),
    }
    assert second.communication["", "send/recv"] == CallTimes(1.0, 0.01, 0.02)
    parts = first.parts
    assert (parts.step_us, parts.compute_us, parts.bubble_us, parts.waiting_us) == (400, 130, 0, 60)
    assert parts.exposed_communication_us == {"mesh_dp": 50, "": 0}  # the send is under the copy
    assert parts.host_us == 400 - 130 - 50 - 60
    assert (second.parts.bubble_us, second.parts.waiting_us) == (20, 0)


def test_one_rank_alone_cannot_tell_waiting(tmp_path):
    ranks, _, told = read(written(tmp_path, two_ranks()[:1]))
    assert ranks[0].communication["mesh_dp", "all_reduce"] == CallTimes(1.0, 0.11, 0.0)
    assert told == ["waiting for other ranks counts as communication where their traces are missing"]


def test_renamed_kernels_without_a_description(tmp_path):
    """facebookresearch/HolisticTraceAnalysis#360: newer names must not count as computation."""
    trace = Steps(0)
    for i, name in enumerate(
        ("ncclKernel_AllReduce_RING_LL_Sum_float(x)", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL")
    ):
        trace.add(name, 100 * i, 100 * i + 50)
    ((rank,), _, _) = read(written(tmp_path, [trace]))
    assert set(rank.communication) == {("", "all_reduce"), ("", "reduce_scatter")}
    assert rank.classes == {} and rank.parts.compute_us == 0


def test_synchronisation_is_no_compute(tmp_path):
    """facebookresearch/HolisticTraceAnalysis PR 162: all-reduce 0-100, 'Stream Sync' 0-100, GEMM 0-20: exposed 80."""
    trace = Steps(0)
    trace.add("ncclDevKernel_AllReduce", 0, 100, **{**ALL_REDUCE, "Process Group Ranks": "[0]"})
    trace.add("Stream Sync", 0, 100, cat="cuda_sync")
    trace.add("Stream Sync", 0, 100)
    trace.add("sm90_xmma_gemm_bf16", 0, 20)
    ((rank,), _, told) = read(written(tmp_path, [trace]))
    assert rank.parts.compute_us == 20 and rank.parts.exposed_communication_us == {"mesh_dp": 80} and told == []


def test_kernel_classes():
    assert kernel_class("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16") == "attention"
    assert kernel_class("void flash_fwd_kernel<...cutlass::bfloat16_t>") == "attention"
    assert kernel_class("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT") == "matrix products"
    assert kernel_class("ampere_bf16_s16816gemm_bf16_128x128") == "matrix products"
    assert kernel_class("void at::native::vectorized_elementwise_kernel<4, ...>") == "other kernels"


# ---- files as they come ----


@pytest.mark.parametrize("value", ["inf", "-inf", "NaN", "N/A", "Infinity"])
def test_bare_numbers(tmp_path, value):
    """pytorch/kineto#105: a copy of zero duration writes its bandwidth as bare inf."""
    text = two_ranks()[0].text().replace('"traceName"', '"x": 1, "traceName"')
    text = text.replace(
        '"args": {"stream": 7, "correlation": 5', f'"args": {{"bandwidth": {value}, "stream": 7, "correlation": 5'
    )
    (rank,), _, told = read([Steps().write(tmp_path / "t.json", text)])
    assert rank.classes == {"matrix products": 0.1, "copies": 0.03}
    mended = [sentence for sentence in told if "mended" in sentence]
    assert len(mended) == (0 if value in ("NaN", "Infinity") else 1)  # Python's own reader takes these


@pytest.mark.parametrize("name", ["C:\\temp\\new kernel", "a\x01b", "line\nbreak", "bad \\u12 escape"])
def test_names_that_are_no_json(tmp_path, name):
    """pytorch/kineto#617, pytorch/pytorch#130622: raw backslashes and control characters."""
    trace = two_ranks()[0]
    trace.add("PLACEHOLDER", 300, 340)
    (rank,), _, _ = read([trace.write(tmp_path / "t.json", trace.text().replace("PLACEHOLDER", name))])
    assert rank.classes["other kernels"] == 0.04 and rank.step_ms == 0.4


def test_absurd_durations_are_left_out(tmp_path):
    """pytorch/kineto PR 646."""
    trace = two_ranks()[0]
    for dur in (-1.7e15, None, float("nan")):
        trace.add("gemm", 300, 310)
        trace.events[-1]["dur"] = dur
    path = trace.write(tmp_path / "t.json")
    (rank,), step_ms, told = read([path])
    assert step_ms == 0.4 and rank.classes["matrix products"] == 0.1
    assert told[0] == f"{path}: 3 events without a usable time were left out"


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_truncated_file_gives_what_is_whole(tmp_path, suffix):
    """Ascend/pytorch#27."""
    trace = two_ranks()[0]
    path = trace.write(tmp_path / f"t{suffix}", trace.text()[: trace.text().index("Memcpy") - 40])
    (rank,), _, told = read([path])
    assert rank.classes == {"matrix products": 0.1} and "truncated at character" in told[0]


def test_a_gzip_stream_that_breaks_off(tmp_path):
    trace = two_ranks()[0]
    for i in range(5000):
        trace.add(f"elementwise {i * 7919 % 1000}", 300, 301)
    path = trace.write(tmp_path / "t.json.gz")
    path.write_bytes(path.read_bytes()[:-2000])
    (rank,), _, told = read([path])
    assert rank.classes["matrix products"] == 0.1 and "truncated" in told[0]


def test_a_bare_list_without_marks_or_numbers(tmp_path):
    events = [
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 5, "dur": 10},
        {"ph": "X", "cat": "kernel", "name": "x", "ts": 20, "dur": 5},
    ]
    (rank,), step_ms, told = read([Steps().write(tmp_path / "rank3.json", json.dumps(events))])
    assert rank.rank == 3 and step_ms == 0.02 and rank.classes == {"matrix products": 0.01, "other kernels": 0.005}
    assert told == [f"{tmp_path / 'rank3.json'}: no mark of a step in it; all of it is taken for one step"]


def test_ranks_from_header_name_or_place(tmp_path):
    """facebookresearch/HolisticTraceAnalysis#107."""
    plain = Steps(None)
    plain.add("gemm", 0, 10)
    ranks, _, told = read([plain.write(tmp_path / "a.json"), plain.write(tmp_path / "run.rank7.json")])
    assert [r.rank for r in ranks] == [0, 7]
    assert told == [f"{tmp_path / 'a.json'}: names no rank; taken for rank 0 by its place in the list"]
    ranks, _, told = read([plain.write(tmp_path / "rank7.json"), plain.write(tmp_path / "again.rank7.json")])
    assert len(ranks) == 1 and "rank 7 again" in told[0]


@pytest.mark.parametrize(
    ("text", "says"), [("", "no .traceEvents."), ('{"traceEvents": [', "no kernel"), ("\x1f\x8b\x00", "traceEvents")]
)
def test_what_is_no_trace_is_one_sentence(tmp_path, text, says):
    with pytest.raises(UsageError, match=says):
        read([Steps().write(tmp_path / "t.pt.trace.json", text)])


# ---- comparison ----


def record(directory, rank, **values):
    (directory / "ranks").mkdir(parents=True, exist_ok=True)
    value = {"format": 1, "rank": rank, "world_size": 2, "step_times_ms": [0.5, 0.45, 0.45], **values}
    (directory / "ranks" / f"{rank:05d}.json").write_text(json.dumps(value))


def test_a_record_with_traces(saved, capsys, tmp_path):
    measured = tmp_path / "measured"
    (measured / "traces").mkdir(parents=True)
    for rank, trace in enumerate(two_ranks()):
        trace.write(measured / "traces" / f"rank{rank:05d}.json.gz")
        peaks = {"peak_allocated_bytes": 70 << 20, "peak_reserved_bytes": (100 + rank) << 20}
        record(measured, rank, traces=[f"traces/rank{rank:05d}.json.gz"], **peaks)
    assert main(["compare", str(saved), str(measured), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["step time"]["measured"] == 0.45 and rows["step time"]["difference"] == pytest.approx(0.01)
    assert rows["peak reserved"]["measured"] == 101 / 1024
    role = {row["name"]: row for row in found["roles"][0]["rows"]}
    assert found["roles"][0]["ranks"] == [0]
    assert role["compute"]["measured"] == 0.13 and role["matrix products"]["measured"] == 0.1
    assert role["all_reduce dp, waiting"]["measured"] == 0.06  # the trace's mesh_dp has the ranks of the run's dp
    assert any("under it, it took 0.40 ms" in note for note in found["notes"])
    assert main(["compare", str(saved), str(measured)]) == 0
    assert "matrix products" in capsys.readouterr().out


def test_ranks_that_the_run_lacks(run, composition, cluster, tmp_path):
    report = build_report(run, composition, cluster, timings={})
    trace = Steps(5)
    trace.add("gemm", 0, 10)
    found = compare(report, read_measured([trace.write(tmp_path / "t.json.gz")]))
    assert found.roles == [] and found.notes[-1] == "ranks 5 were measured, but are none of the run's 2"


def test_a_record_of_the_host_alone(tmp_path):
    record(tmp_path / "run", 0, peak_host_bytes=1 << 30)
    measured = read_measured([tmp_path / "run"], GroupTable())
    assert measured.step_time_ms == 0.45 and measured.peak_host_bytes == {0: 1 << 30}
    assert measured.notes == ["1 of 2 ranks left a record"]


def test_an_empty_directory(tmp_path):
    with pytest.raises(UsageError, match="neither a record"):
        read_measured([tmp_path])
