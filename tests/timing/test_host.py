"""Settling of host times: medians over equal moments, nothing else touched."""

import numpy as np

from echo_hooks.graph.ops import OpSignature
from echo_hooks.graph.program import HOST_STREAM, Kind
from echo_hooks.graph.recorder import Recorder
from echo_hooks.graph.rundir import RankTrace
from echo_hooks.timing.host import COMMUNICATION_CALL_US, add_communication_calls, settle_host_times


class Clock:
    def __init__(self):
        self.now = 0

    def __call__(self) -> int:
        return self.now


def trace_of(rank: int, records: list[tuple[str, str, int]]) -> RankTrace:
    """One compute record for each (op, module, host microseconds)."""
    clock = Clock()
    recorder = Recorder(rank, 2, clock_ns=clock)
    for op, module, host_us in records:
        clock.now += host_us * 1000
        recorder.module = recorder.program.string(module)
        recorder.compute(recorder.ops.add(OpSignature(op)))
    program = recorder.program.program()
    return RankTrace(rank, program, program.slice(0, 0), recorder.ops.signatures, recorder.groups, {})


def test_equal_moments_of_all_ranks_get_their_median():
    step = [("mm", "net.0", 10), ("gelu", "net.0", 4), ("mm", "net.1", 12), ("gelu", "net.1", 6)]
    noisy = [("mm", "net.0", 10), ("gelu", "net.0", 4000), ("mm", "net.1", 14), ("gelu", "net.1", 5)]
    traces = [trace_of(0, step * 2), trace_of(1, noisy)]
    settle_host_times(traces)
    # gelu after mm in net.#: 4, 6, 4, 6, 4000, 5 -> 5.5; mm after gelu: 12, 10, 12, 14 -> 12; the first mm of each
    # rank has no predecessor, which makes two occurrences: kept.
    np.testing.assert_allclose(traces[0].program.host_us, [10, 5.5, 12, 5.5, 12, 5.5, 12, 5.5])
    np.testing.assert_allclose(traces[1].program.host_us, [10, 5.5, 12, 5.5])


def test_rare_moments_keep_their_measurement():
    trace = trace_of(0, [("a", "", 1), ("b", "", 900), ("a", "", 3)])
    settle_host_times([trace])
    np.testing.assert_allclose(trace.program.host_us, [1, 900, 3])


def test_the_same_op_elsewhere_is_another_moment():
    records = [("mm", "attention", 10), ("mm", "mlp", 50)] * 4
    trace = trace_of(0, records)
    settle_host_times([trace])
    np.testing.assert_allclose(trace.program.host_us, [10, 50] * 4)


def test_no_records_is_no_error():
    settle_host_times([])
    settle_host_times([trace_of(0, [])])


def test_a_communication_call_costs_the_host_once_per_kernel_and_only_on_the_device():
    recorder = Recorder(0, 2, clock_ns=Clock())
    call = {"group": 0, "bytes": 8, "dtype": "float32", "site": "x:1"}
    recorder.communication(Kind.COLLECTIVE, OpSignature("all_reduce"), seq=0, **call)
    recorder.communication(Kind.COLLECTIVE, OpSignature("all_reduce"), seq=1, stream=HOST_STREAM, **call)
    with recorder.batch():
        for _ in range(3):
            recorder.communication(Kind.SEND, OpSignature("send"), peer=1, **call)
    recorder.compute(recorder.ops.add(OpSignature("mm")))
    program = recorder.program.program()
    trace = RankTrace(0, program, program.slice(0, 0), recorder.ops.signatures, recorder.groups, {})
    add_communication_calls(trace)
    assert trace.program.host_us.tolist() == [COMMUNICATION_CALL_US, 0, COMMUNICATION_CALL_US, 0, 0, 0]


def test_warm_up_steps_count_too_but_for_the_first():
    step = [("mm", "net.0", 10), ("gelu", "net.0", 4), ("loss", "", 7)]
    first = [("mm", "net.0", 9000), ("gelu", "net.0", 9000), ("loss", "", 9000)]
    disturbed = [("mm", "net.0", 30), ("gelu", "net.0", 12), ("loss", "", 21)]
    whole = trace_of(0, first + step * 3 + disturbed)
    program = whole.program
    trace = RankTrace(
        0, program.slice(12, 15), program.slice(0, 12), whole.ops, whole.groups, {}, step_ends=[3, 6, 9, 12, 15]
    )
    settle_host_times([trace])
    np.testing.assert_allclose(trace.program.host_us, [30, 4, 7])  # the measured mm is the first of its program
    np.testing.assert_allclose(trace.prologue.host_us[:3], 9000)
