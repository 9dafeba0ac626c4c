"""The recorder: host time without Echo's own, batches, running numbers, assumptions."""

from echo_hooks.graph.ops import OpSignature
from echo_hooks.graph.program import Kind
from echo_hooks.graph.recorder import Recorder


class Clock:
    now = 0

    def __call__(self) -> int:
        return self.now


def test_host_time_leaves_out_what_passes_inside():
    clock = Clock()
    recorder = Recorder(0, 1, clock_ns=clock)
    clock.now = 5_000  # 5 us of the script
    with recorder.own_time():
        clock.now = 100_000  # ours
        with recorder.own_time():
            clock.now = 200_000
        recorder.compute(recorder.ops.add(OpSignature("a")))
    clock.now = 202_500  # 2.5 us of the script
    recorder.record_event()
    assert recorder.program.program().host_us.tolist() == [5.0, 2.5]


def test_calls_in_a_batch_share_a_number_and_nesting_is_one_batch():
    recorder = Recorder(0, 2)
    recorder.groups.add((0, 1), name="world")
    send = OpSignature("send")

    def record():
        recorder.communication(Kind.SEND, send, group=0, bytes=8, dtype="float32", peer=1)

    with recorder.batch():
        record()
        with recorder.batch():
            record()
    record()
    with recorder.batch():
        record()
    assert recorder.program.program().batch.tolist() == [0, 0, -1, 1]


def test_running_numbers_count_per_group():
    recorder = Recorder(0, 2)
    assert [recorder.next_seq(0), recorder.next_seq(1), recorder.next_seq(0)] == [0, 0, 1]


def test_assumptions_aggregate_by_kind_value_and_line():
    recorder = Recorder(0, 1)
    for _ in range(3):
        recorder.assume("item", 1.0)
    (found,) = recorder.assumptions.values()
    assert (found.kind, found.value, found.count) == ("item", "1.0", 3)
    assert found.site.startswith("test_recorder.py:")


def test_equal_signatures_are_one_op():
    recorder = Recorder(0, 1)
    assert recorder.ops.add(OpSignature("a", flops=2)) == recorder.ops.add(OpSignature("a", flops=2)) == 0
    assert recorder.ops.add(OpSignature("a", flops=3)) == 1
