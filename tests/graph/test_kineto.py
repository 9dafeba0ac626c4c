"""Import of profiler traces: a hand-made step on two ranks, and files that are none."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from echo_hooks.compose import compose
from echo_hooks.errors import UsageError
from echo_hooks.graph.kineto import read_kineto
from echo_hooks.graph.merge import merge_groups
from echo_hooks.graph.program import Evidence, Kind
from echo_hooks.graph.roles import Role

ELEMENTS = 1 << 20
GROUP = {
    "Process Group Name": "3",
    "Process Group Description": "dp",
    "Process Group Ranks": "[0, 1]",
    "In msg nelems": ELEMENTS,
    "Out msg nelems": ELEMENTS,
    "dtype": "BFloat16",
}


class Trace:
    """Chrome events by plain calls."""

    def __init__(self):
        self.events = [{"name": "process_name", "ph": "M", "ts": 0.0, "pid": 1, "args": {"name": "python"}}]
        self.correlation = 0

    def add(self, cat, name, ts, dur, tid=1, **args):
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )

    def launch(self, call_us, start_us, dur, stream=7, name="gemm", tid=1, **args):
        """A call of 2 us, and its kernel."""
        self.correlation += 1
        self.add("cuda_runtime", "cudaLaunchKernel", call_us, 2.0, tid, correlation=self.correlation)
        self.add("kernel", name, start_us, dur, tid=stream, stream=stream, correlation=self.correlation, **args)

    def call(self, name, ts, dur, tid=1):
        self.correlation += 1
        self.add("cuda_runtime", name, ts, dur, tid, correlation=self.correlation)

    def step(self, begin, first=50.0, reduce=(60.0, 30.0)):
        """A kernel, an all-reduce on a second stream behind it, a kernel behind that; times from ``begin``."""
        self.launch(begin + 8, begin + 10, first)
        self.call("cudaEventRecord", begin + 11, 1)
        self.call("cudaStreamWaitEvent", begin + 12, 1)
        self.launch(
            begin + 14,
            begin + reduce[0],
            reduce[1],
            17,
            "ncclDevKernel_AllReduce",
            **GROUP,
            **{"Collective name": "allreduce"},
        )
        self.call("cudaStreamWaitEvent", begin + 18, 1)
        self.launch(begin + 20, begin + reduce[0] + reduce[1] + 1, 9)
        self.add("user_annotation", "Optimizer.step#AdamW.step", begin + 19, 5)
        end = begin + sum(reduce) + 10
        self.call("cudaDeviceSynchronize", begin + 30, end - begin - 28)
        return end + 2

    def write(self, path, text=None):
        body = text if text is not None else json.dumps({"schemaVersion": 1, "traceEvents": self.events, "tail": 1})
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(body.encode()))
        else:
            path.write_text(body)
        return path


def two_steps(**options) -> Trace:
    trace = Trace()
    trace.step(trace.step(1000.0, **options), **options)
    return trace


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_a_step(tmp_path, name):
    measured = read_kineto(two_steps().write(tmp_path / name), 0)
    program, ops = measured.trace.program, measured.trace.ops
    assert [Kind(k).name for k in program.kind] == [
        *("MARK", "COMPUTE", "RECORD_EVENT", "WAIT_EVENT", "COLLECTIVE", "RECORD_EVENT", "WAIT_EVENT", "COMPUTE"),
        *("SYNC", "MARK"),
    ]
    assert measured.step_us == 102.0 and measured.trace.steps == 1 and measured.inferred_waits == 2
    # The host: to the return of a launch, or to the begin of a synchronisation; 2 us to wake up from it.
    assert program.host_us.tolist() == [0, 10, 0, 0, 6, 0, 0, 6, 8, 2]
    assert program.stream[[1, 2, 3, 4, 5, 6, 7]].tolist() == [0, 0, 1, 1, 1, 0, 0]
    assert program.event[2] == program.event[3] != program.event[5] == program.event[6]
    # The kernel behind the all-reduce began 1 us after it: its launch's time on the device.
    assert program.duration_us[[1, 4, 7]].tolist() == [50, 30, 10]
    assert (program.evidence[[1, 4, 7]] == Evidence.MEASURED).all()
    assert program.bytes[4] == 2 * ELEMENTS and program.strings[program.dtype[4]] == "bfloat16"
    assert ops[program.op[4]].name == "all_reduce" and ops[program.op[7]].name == "gemm"
    assert [(g.name, g.ranks) for g in measured.trace.groups] == [("dp", (0, 1))]


def test_replayed_it_takes_what_was_measured(tmp_path):
    """Rank 1's first kernel is the shorter one, and its all-reduce waits 20 us for rank 0."""
    ranks = {
        0: read_kineto(two_steps().write(tmp_path / "0.json"), 0),
        1: read_kineto(two_steps(first=30.0, reduce=(40.0, 50.0)).write(tmp_path / "1.json"), 1),
    }
    traces = {rank: measured.trace for rank, measured in ranks.items()}
    least = min(float(t.program.duration_us[4]) for t in traces.values())

    class Network:
        def collective(self, *args, **kwargs):
            from types import SimpleNamespace

            return SimpleNamespace(duration_us=least)

    roles = [Role(str(rank), rank, (rank,), (rank,)) for rank in ranks]
    result = compose(2, merge_groups(traces.values()), roles, traces, Network(), accelerators_per_node=8)
    assert least == 30.0 and result.step_time_us == 102.0
    assert [t.breakdown.waiting_us for t in result.timelines] == [0.0, 20.0]


def test_the_host_waits_for_an_event_and_for_a_blocking_copy(tmp_path):
    trace = two_steps()
    end = trace.events[-1]["ts"] + trace.events[-1]["dur"]
    trace.launch(end + 4, end + 6, 20)
    trace.launch(end + 8, end + 26, 50)
    trace.call("cudaEventSynchronize", end + 12, 16)  # until the first kernel's end at 26, and 2 to wake up
    trace.correlation += 1
    trace.add("cuda_runtime", "cudaMemcpyAsync", end + 30, 50, correlation=trace.correlation)
    trace.add(
        "gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", end + 76, 3, stream=7, correlation=trace.correlation, bytes=64
    )
    trace.add("user_annotation", "Optimizer.step#AdamW.step", end + 81, 2)
    trace.call("cudaDeviceSynchronize", end + 90, 4)
    program = read_kineto(trace.write(tmp_path / "t.json"), 0).trace.program
    last = program.slice(len(program) - 8, len(program))
    assert [Kind(k).name for k in last.kind] == [
        *("COMPUTE", "RECORD_EVENT", "COMPUTE", "SYNC", "COPY", "SYNC", "SYNC", "MARK"),
    ]
    assert last.event[3] == last.event[1] >= 0 and last.event[5] == -1 and last.stream[[5, 6]].tolist() == [0, -1]
    # 2 to wake up before; issued at 6, 10, 12; the wait ends at 26, the copy begins at 76, ends at 79; then 90, 94.
    assert last.host_us.tolist() == [8, 0, 4, 2, 50, 0, 11, 4]
    assert last.bytes[4] == 64


def test_grouped_sends(tmp_path):
    trace = two_steps()
    end = trace.events[-1]["ts"] + trace.events[-1]["dur"]
    for name, key in (("send", "Dst Rank"), ("recv", "Src Rank")):
        trace.add("cpu_op", "record_param_comms", end + 1, 1, **GROUP, **{"Collective name": name, key: 1})
    trace.launch(end + 4, end + 6, 12, 17, "ncclDevKernel_SendRecv")
    trace.add("user_annotation", "Optimizer.step#AdamW.step", end + 5, 2)
    trace.call("cudaDeviceSynchronize", end + 8, 14)
    program = read_kineto(trace.write(tmp_path / "t.json"), 0).trace.program
    parts = np.flatnonzero(program.batch >= 0)
    assert program.kind[parts].tolist() == [Kind.SEND, Kind.RECV]
    assert program.peer[parts].tolist() == [1, 1] and program.bytes[parts].tolist() == [2 * ELEMENTS] * 2


def test_profiler_steps_bound_what_is_imported(tmp_path):
    trace = two_steps()
    trace.events = [e for e in trace.events if not e["name"].startswith("Optimizer")]
    trace.add("user_annotation", "ProfilerStep#1", 1000, 102)
    trace.add("user_annotation", "ProfilerStep#2", 1102, 102)
    assert read_kineto(trace.write(tmp_path / "t.json"), 0).step_us == 102.0


WHOLE = json.dumps({"traceEvents": two_steps().events})


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("", 'no "traceEvents"'),
        ("{}", 'no "traceEvents"'),
        ('{"traceEvents": []}', "no kernel"),
        ('{"traceEvents": ', 'no "traceEvents"'),
        (WHOLE[: len(WHOLE) // 2], "truncated"),
        (WHOLE[:-2], "truncated"),
        (WHOLE.replace('"dur": 50.0', '"dur": Infinity', 1), "dur of event 'gemm' is inf"),
        (WHOLE.replace('"dur": 50.0', '"dur": -1', 1), "dur of event 'gemm' is -1"),
        (WHOLE.replace('"dur": 50.0', '"dur": "long"', 1), "is 'long'"),
        (WHOLE.replace('"stream": 7', '"stream": null', 1), "stream of event"),
        (WHOLE.replace("Optimizer.step", "Optimizer.zero"), "no step in it"),
        (WHOLE.replace("BFloat16", "Quaternion"), "'Quaternion' is not known"),
        (WHOLE.replace("[0, 1]", "[0, 1, ...]"), "a whole list with rank 0"),
        (WHOLE.replace('"allreduce"', '"telepathy"'), "without a description"),
        ('{"traceEvents": [' + "[" * 100_000, "cannot be read"),
        ('{"traceEvents": [{"ts": ' + "9" * 10_000 + "}]}", "cannot be read"),
    ],
)
def test_files_that_are_no_trace(tmp_path, text, sentence):
    with pytest.raises(UsageError, match=r"t\.json") as caught:
        read_kineto(Trace().write(tmp_path / "t.json.gz", text), 0)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_damaged_archives(tmp_path):
    path = two_steps().write(tmp_path / "t.json.gz")
    data = path.read_bytes()
    for damaged in (data[: len(data) // 2], data[:40] + bytes(40) + data[80:], b"no archive", b""):
        path.write_bytes(damaged)
        with pytest.raises(UsageError):
            read_kineto(path, 0)
    with pytest.raises(UsageError, match="missing"):
        read_kineto(tmp_path / "missing.json", 0)
    (tmp_path / "binary.json").write_bytes(bytes(range(256)))
    with pytest.raises(UsageError, match="binary"):
        read_kineto(tmp_path / "binary.json", 0)
