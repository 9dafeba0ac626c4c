"""The trace file: what the Trace Event format asks for, and what a viewer would show."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict

import numpy as np
import pytest

from echo_hooks.compose.result import Composition
from echo_hooks.errors import UsageError
from echo_hooks.report.perfetto import write_perfetto

MIB = 1 << 20
REQUIRED = {
    "X": {"name", "ts", "dur", "pid", "tid", "cat"},
    "M": {"name", "pid", "args"},
    "C": {"name", "ts", "pid", "args"},
    "i": {"name", "ts", "pid", "tid", "s"},
    "s": {"name", "ts", "pid", "tid", "id"},
    "f": {"name", "ts", "pid", "tid", "id", "bp"},
}


@pytest.fixture
def events(run, composition, tmp_path):
    path = tmp_path / "trace.json.gz"
    write_perfetto(path, run, composition)
    return json.loads(gzip.decompress(path.read_bytes()), parse_constant=pytest.fail)["traceEvents"]


def slices(events, pid, name):
    return [e for e in events if e["ph"] == "X" and e["pid"] == pid and e["name"] == name and e["cat"] != "host"]


def check_structure(events):
    for event in events:
        assert REQUIRED[event["ph"]] <= event.keys()
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
    named = [e for e in events if e["name"] == "thread_name"]
    tids = [e["tid"] for e in named]
    assert len(set(tids)) == len(tids)
    assert {e["tid"] for e in events if e["ph"] == "X"} <= set(tids)
    by_thread = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            by_thread[event["tid"]].append((round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3)))
    for spans in by_thread.values():
        assert [begin for begin, _ in spans] == sorted(begin for begin, _ in spans)
        open_ends: list[int] = []
        for begin, end in spans:  # nested or apart, never crossing
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    for flow in starts:
        assert starts[flow]["ts"] < ends[flow]["ts"]
        for end in (starts[flow], ends[flow]):
            assert any(b <= round(end["ts"] * 1e3) <= e for b, e in by_thread[end["tid"]])


def test_structure(events):
    check_structure(events)


def test_processes_and_threads_have_names(events):
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {1: "rank 0: stage 0 (critical)", 2: "rank 1: stage 1"}
    threads = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 1]
    assert threads == ["host", "stream 0 default", "stream 1 comm:pp", "stream 2 comm:dp"]


def test_times_are_microseconds_on_one_clock(events):
    (reduce0,), (reduce1,) = slices(events, 1, "all_reduce dp"), slices(events, 2, "all_reduce dp")
    assert (reduce0["ts"], reduce0["dur"]) == (200.0, 200.0)
    assert (reduce1["ts"], reduce1["dur"]) == (260.0, 140.0)  # 255 on rank 1's own clock
    (wait,) = [e for e in slices(events, 1, "waits for the last member") if e["tid"] == reduce0["tid"]]
    assert (wait["ts"], wait["dur"]) == (200.0, 60.0)


def test_slices_carry_arguments(events):
    reduce = slices(events, 1, "all_reduce dp")[0]["args"]
    assert (
        reduce
        | {
            "group": "dp",
            "ranks": "0-1",
            "bytes": 14 * MIB,
            "dtype": "bfloat16",
            "site": "train.py:42",
            "seq": 0,
        }
        == reduce
    )
    assert slices(events, 2, "recv pp")[0]["args"]["peer"] == "0"
    forward = slices(events, 1, "aten.mm")[0]["args"]
    assert (forward["module"], forward["phase"], forward["evidence"]) == ("layers.3.mlp", "forward", "modelled")
    assert forward["flops"] == 2 * 10**9


def test_every_kernel_is_there_once(events, composition):
    device = [e for e in events if e["ph"] == "X" and e["cat"] in ("compute", "copy", "communication")]
    assert len(device) == sum(int(np.isfinite(t.start_us).sum()) for t in composition.timelines)


def test_arrows_come_from_the_member_that_is_waited_for(events):
    arrows = [
        (s["pid"], f["pid"]) for s in events for f in events if s["ph"] == "s" and f["ph"] == "f" and s["id"] == f["id"]
    ]
    assert arrows == [(1, 2), (2, 1)]  # the send releases the recv; rank 1 comes last to the all-reduce


def test_memory_counter(events):
    points = [(e["ts"], e["args"]["bytes"] // MIB) for e in events if e["ph"] == "C" and e["pid"] == 1]
    assert points == [(0.0, 60), (20.0, 70), (30.0, 50)]


def test_synchronisation_is_shown_as_waiting(events):
    (wait,) = slices(events, 1, "wait for the device")
    assert (wait["ts"], wait["ts"] + wait["dur"]) == (60.0, 450.0)


def test_same_bytes_twice(run, composition, tmp_path):
    paths = [tmp_path / "a.json.gz", tmp_path / "b.json.gz"]
    for path in paths:
        write_perfetto(path, run, composition)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    write_perfetto(tmp_path / "c.json", run, composition)
    assert gzip.decompress(paths[0].read_bytes()) == (tmp_path / "c.json").read_bytes()


def test_too_many_records_leave_classes_out_and_say_so(run, composition, tmp_path):
    summary = write_perfetto(tmp_path / "trace.json", run, composition, max_records=8)
    assert summary.left_out == ["rank 1: stage 1"]
    value = json.loads((tmp_path / "trace.json").read_text())
    assert value["otherData"]["left_out"] == ["rank 1: stage 1"]
    check_structure(value["traceEvents"])


def test_times_that_are_no_numbers_are_left_out(run, composition, tmp_path):
    timeline = composition.timelines[0]
    timeline.start_us[1] = np.inf
    timeline.issue_us[2] = np.nan
    timeline.slowdown[3] = np.nan
    write_perfetto(tmp_path / "trace.json", run, composition)
    check_structure(json.loads((tmp_path / "trace.json").read_text(), parse_constant=pytest.fail)["traceEvents"])


def test_overlapping_kernels_of_a_stream_get_a_lane_of_their_own(run, composition, tmp_path):
    composition.timelines[0].start_us[3] = 50.0  # backward begins while forward runs
    write_perfetto(tmp_path / "trace.json", run, composition)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    check_structure(events)
    assert "stream 0 default (2)" in [e["args"]["name"] for e in events if e["name"] == "thread_name"]


def test_a_batch_is_one_slice(run, composition, tmp_path):
    timeline = composition.timelines[0]
    program = timeline.program
    for column in program.columns.values():  # the all-reduce becomes a second send of one grouped call
        column[4] = column[2]
    program.columns["batch"][[2, 4]] = 0
    for times in (timeline.start_us, timeline.ready_us, timeline.end_us):
        times[4] = times[2]
    write_perfetto(tmp_path / "trace.json", run, composition)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    check_structure(events)
    (send,) = slices(events, 1, "send pp")
    assert (send["args"]["calls"], send["args"]["bytes"]) == (2, 4 * MIB)


def test_hostile_names_stay_json(run, composition, tmp_path):
    run.traces[0].program.strings[2] = 'C:\\new\x01\n"</script>'
    composition.timelines[0].role = run.roles[0].name = "r\ud800le"
    write_perfetto(tmp_path / "trace.json", run, composition)
    check_structure(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])


def test_without_a_timeline(run, tmp_path):
    with pytest.raises(UsageError, match="no timeline"):
        write_perfetto(tmp_path / "trace.json", run, Composition(float("nan")))
