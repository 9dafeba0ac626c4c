"""Reading logs: every layout, mixed with noise, cut off, or not logs at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_hooks.errors import UsageError
from echo_hooks.network.sweep_files import read_sweeps
from echo_hooks.network.sweep_logs import read_text

ECHO = Path(__file__).parent / "data" / "echo"  # NetX-lab/Echo 15f0d12c, nccl-test-log (MIT)

DEVICES = """# Using devices
#  Rank  0 Group  0 Pid   9 on   node1 device  0 [0000:1b:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   9 on   node1 device  1 [0000:1c:00] NVIDIA H100 80GB HBM3
#  Rank  2 Group  0 Pid   9 on   node2 device  0 [0000:1b:00] NVIDIA H100 80GB HBM3
#  Rank  3 Group  0 Pid   9 on   node2 device  1 [0000:1c:00] NVIDIA H100 80GB HBM3
"""
NEW = f"""# nccl-tests version 2.17.1 nccl-headers=22703 nccl-library=22703
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 1 minBytes 8388608 maxBytes 16777216 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1
{DEVICES}#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     8388608       2097152     float     sum      -1   100.00   83.89  125.83      0   101.00   83.06  124.58      0
    16777216       4194304     float     sum      -1   190.00   88.30  132.45      0   191.00   87.84  131.76      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 128.6
"""
OLD = f"""# nThread 1 nGpus 1 minBytes 8388608 maxBytes 16777216 step: 2(factor) warmup iters: 1 iters: 20 validation: 1
{DEVICES.replace(" Group  0", "")}#
#                                                       out-of-place                       in-place
#       size         count      type   redop     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)                       (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     8388608       2097152     float     sum   100.00   83.89  125.83  2e-07   101.00   83.06  124.58  2e-07
    16777216       4194304     float     sum   190.00   88.30  132.45  2e-07   191.00   87.84  131.76    N/A
# Out of bounds values : 0 OK
"""
POINTS = ((8388608, 100.0), (16777216, 190.0))


def read(tmp_path, text, name="run.log", **said):
    path = tmp_path / name
    path.write_text(text)
    return read_sweeps(path, **said)


@pytest.mark.parametrize("text", [NEW, OLD, NEW.replace("    root", "").replace("      -1", "")])
def test_layouts_of_one_run_give_the_same(tmp_path, text):
    (sweep,) = read(tmp_path, text)
    assert (sweep.collective, sweep.ranks, sweep.nodes, sweep.points) == ("all_reduce", 4, 2, POINTS)
    assert (sweep.dtype, sweep.rejected, sweep.gpus_per_thread) == ("float32", 0, 1)


def test_version_and_device_are_read(tmp_path):
    (sweep,) = read(tmp_path, NEW)
    assert (sweep.nccl_version, sweep.accelerator) == ("2.27.3", "NVIDIA H100 80GB HBM3")


def test_noise_prefixes_and_a_cut_off_tail(tmp_path):
    lines = NEW.splitlines()
    at = next(i for i, line in enumerate(lines) if line.lstrip().startswith("16777216"))
    lines.insert(at, "node1:123:456 [0] NCCL INFO Channel 00/24 : 0 1 2 3")
    lines.insert(at + 1, "node1:123:456 [0] NCCL WARN something 1 2 3 4 5 6 7 8 9")
    lines[at + 2] += "\n    33554432       8388608     float     sum      -1   37"
    text = "\n".join(f"[1,0]<stdout>:{line}" if line.lstrip().startswith(("#", "8388608")) else line for line in lines)
    (sweep,) = read(tmp_path, text)
    assert sweep.points == POINTS
    assert sweep.rejected == 1


def test_a_row_whose_columns_contradict_each_other_is_left_out(tmp_path):
    (sweep,) = read(tmp_path, NEW.replace("190.00   88.30", "19.000   88.30"))
    assert sweep.points == POINTS[:1]
    assert sweep.rejected == 1


def test_two_tests_in_one_file_are_kept_apart(tmp_path):
    gather = NEW.replace("all_reduce_perf", "all_gather_perf").replace(" sum ", "none ")
    gather = gather.replace("125.83", " 62.92").replace("124.58", " 62.30").replace("132.45", " 66.23")
    first, second = read(tmp_path, NEW + gather.replace("131.76", " 65.88"))
    assert (first.collective, second.collective) == ("all_reduce", "all_gather")
    assert first.points == second.points == POINTS


def test_the_published_logs():
    for n in (2, 4, 8, 16):
        (sweep,) = read_sweeps(ECHO / f"nccl_{n}.log")
        assert (sweep.collective, sweep.ranks, sweep.nodes) == ("all_reduce", n, 2 if n == 16 else 1)
        assert (len(sweep.points), sweep.rejected) == (25 if n == 16 else 28, 0)
        assert sweep.gpus_per_thread == (1 if n == 16 else n)
    assert sweep.points[-1] == (17179869184, 250681.0)  # the smaller of 251757 and 250681


def test_json_keyed_by_size(tmp_path):
    rows = {
        "33554432": {"count": 8388608, "type": "float", "oop_time": 1494.28, "oop_algbw": 22.455, "ip_time": "N/A"},
        "1024": {"oop_time": "N/A", "ip_time": "N/A"},
    }
    (sweep,) = read(tmp_path, json.dumps(rows), "r.json", collective="alltoall", ranks=8)
    assert sweep.points == ((33554432, 1494.28),)  # N/A is not zero
    assert sweep.rejected == 1
    algorithm = sweep.points[0][0] / sweep.points[0][1] / 1e3
    assert (round(algorithm, 3), round(algorithm * 7 / 8, 3)) == (22.455, 19.648)


def test_json_line_by_line(tmp_path):
    line = {"name": "AllReduce", "nodes": 1, "ranks": 4, "size": 1024, "type": "float", "inPlace": 0, "time": 19.18}
    text = json.dumps(line) + "\n" + json.dumps(line | {"inPlace": 1, "time": 21.0}) + '\n{"name": "All'
    (sweep,) = read(tmp_path, text, "r.json")
    assert (sweep.collective, sweep.ranks, sweep.nodes, sweep.points) == ("all_reduce", 4, 1, ((1024, 19.18),))


def test_json_report_of_nccl_tests(tmp_path):
    device = {"hostname": "a", "device_info": "H100"}
    report = {
        "version": 3,
        "args": ["./build/all_gather_perf", "-b", "8"],
        "nccl_version": 22809,
        "config": {"nthreads": 1, "ngpus": 2, "devices": [device | {"rank": 0}, device | {"rank": 1}]},
        "results": [
            {"size": 1024, "type": "half", "out_of_place": {"time": 5.0}, "in_place": {"time": 4.5}},
            {"size": 2048, "type": "half", "out_of_place": None, "in_place": {"time": None}},
        ],
    }
    (sweep,) = read(tmp_path, json.dumps(report), "r.json")
    assert (sweep.collective, sweep.ranks, sweep.nodes, sweep.nccl_version) == ("all_gather", 2, 1, "2.28.9")
    assert (sweep.points, sweep.rejected, sweep.gpus_per_thread) == (((1024, 4.5),), 1, 2)


def test_csv(tmp_path):
    text = "collective,ranks,bytes,kernel_us,kernel\nall_reduce,2,1024,4.64,x\nall_reduce,2,2048,nan,x\nsend,2,8,1,x\n"
    first, second = read(tmp_path, text, "k.csv")
    assert (first.collective, first.clock, first.points, first.rejected) == ("all_reduce", "kernel", ((1024, 4.64),), 1)
    assert second.collective == "send"


@pytest.mark.parametrize(
    ("text", "said", "message"),
    [
        ("", {}, "empty"),
        ("hello\nworld\n", {}, "no table of nccl-tests"),
        (NEW, {"collective": "all_gather"}, "is a log of all_reduce"),
        (NEW, {"ranks": 8}, "was run on 4 ranks, not on 8"),
        (NEW, {"nodes": 3}, "was run on 2 nodes, not on 3"),
        (NEW, {"collective": "all_sum"}, "unknown collective"),
        (OLD.replace(DEVICES.replace(" Group  0", ""), ""), {"collective": "all_reduce"}, "how many ranks"),
        (NEW.replace("124.58", "83.06").replace("131.76", "87.84"), {}, "not all_reduce"),
        ("{", {}, "neither valid JSON"),
        ('{"results": []}', {"ranks": 2, "collective": "all_reduce"}, "no usable row"),
        ("size,collective\n8,all_reduce\n", {}, "no column of times"),
        ("bytes,time_us\n8,1\n", {}, "names the collective"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used_say_why(tmp_path, text, said, message):
    with pytest.raises(UsageError, match=message) as error:
        read(tmp_path, text, **said)
    assert "\n" not in str(error.value)


def test_an_all_gather_log_that_names_no_test_must_be_told(tmp_path):
    text = OLD.replace(" sum ", "none ").replace("125.83", " 62.92").replace("132.45", " 66.23")
    text = text.replace("124.58", " 62.30").replace("131.76", " 65.88")
    with pytest.raises(UsageError, match="does not say which collective"):
        read(tmp_path, text)
    assert read(tmp_path, text, collective="all_gather")[0].points == POINTS


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(NEW.splitlines()) | st.text(max_size=80), max_size=30))
def test_no_text_breaks_the_reader(lines):
    try:
        sweeps = read_text(lines, "fuzz")
    except UsageError:
        return
    assert all(time > 0 for sweep in sweeps for _, time in sweep.points)
