"""A step's program from hand-made profiler events, spans of Echo's own code, and unprofiled host times."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from echo_hooks.capture.measured_steps import Boundary, MeasuredStep, StepReader
from echo_hooks.graph import live
from echo_hooks.graph.kineto_events import Call, Events, Work
from echo_hooks.graph.live import LiveRecorder, Span
from echo_hooks.graph.ops import OpSignature
from echo_hooks.graph.program import Kind, Phase

DEVICE_STREAM = 7  # CUPTI's number of the default stream


@dataclass
class Story:
    """Steps told in microseconds; ``step()`` ends one."""

    recorder: LiveRecorder = field(default_factory=lambda: LiveRecorder(0, 2))
    events: Events = field(default_factory=Events)
    boundaries: list[Boundary] = field(default_factory=list)
    us: float = 0.0
    correlation: int = 0

    def launch(
        self,
        name: str,
        host: float,
        device: tuple[float, float],
        stream: int = DEVICE_STREAM,
        call="cudaLaunchKernel",
        took=2.0,
    ):
        """``host``: begin of the call. ``device``: begin and end of the kernel."""
        self.correlation += 1
        self.events.calls.append(Call(call, "1", host, host + took, {"correlation": self.correlation}))
        kind = Kind.COPY if name.startswith("Memcpy") else Kind.COMPUTE
        self.events.launched[self.correlation].append(Work(kind, name, stream, *device, {}))

    def call(self, name: str, begin: float, end: float):
        self.correlation += 1
        self.events.calls.append(Call(name, "1", begin, end, {"correlation": self.correlation}))

    def own(self, begin: float, end: float, *records, tag: str = "", number: int = -1):
        """Echo's code from ``begin`` to ``end``; ``records`` write to the recorder."""
        first = len(self.recorder.program)
        for record in records:
            record(self.recorder)
        last = len(self.recorder.program)
        self.recorder.spans.append(Span(round(begin * 1e3), round(end * 1e3), 1, first, last, tag, number))

    def step(self, at: float):
        self.boundaries.append(Boundary(len(self.recorder.spans), len(self.recorder.program), round(at * 1e3)))

    def read(self, timed: range, captured: range) -> MeasuredStep:
        self.events.calls.sort(key=lambda call: call.start_us)
        return StepReader(self.recorder, self.events, [], self.boundaries, 0).read(timed, captured)


def all_reduce(recorder):
    signature = OpSignature("all_reduce")
    recorder.program.append(Kind.COLLECTIVE, op=recorder.ops.add(signature), group=0, bytes=64, seq=0)


def rows(step: MeasuredStep, *kinds: Kind):
    return [(kind, values) for kind, values in step.rows if kind in kinds]


def simple(story: Story, begin: float, kernel_us: float = 10.0, slower: float = 1.0, profiled: bool = True):
    """A kernel, a collective, a kernel: 100 us of host time (times ``slower``) beside 20 of Echo's own."""
    if profiled:
        story.launch("first", begin + 38 * slower, (begin + 45 * slower, begin + 45 * slower + kernel_us))
        story.launch("fill", begin + 45 * slower, (begin + 60 * slower, begin + 65 * slower))  # inside Echo's span
        story.launch("second", begin + 20 + 88 * slower, (begin + 20 + 95 * slower, begin + 25 + 95 * slower))
    story.own(begin + 40 * slower + 2, begin + 40 * slower + 22, all_reduce)
    return begin + 20 + 100 * slower


def test_kernels_and_communication_in_the_host_s_order():
    story = Story()
    story.step(0.0)
    end = simple(story, 0.0, profiled=False)
    story.step(end)
    story.step(simple(story, end))
    step = story.read(range(1, 2), range(1, 2))
    names = [
        story.recorder.ops.signatures[values["op"]].name if values.get("op", -1) >= 0 else kind.name
        for kind, values in step.rows
    ]
    assert names == ["step_begin", "first", "all_reduce", "second", "HOST", "step_end"]
    # Nothing of the fill that Echo launched, and none of the 20 us that it took.
    assert sum(values.get("host_us", 0.0) for _, values in step.rows) == pytest.approx(100.0, abs=0.5)
    assert step.wall_ms == pytest.approx(0.12)


def test_the_profilers_cost_is_taken_out_of_the_host_time():
    story = Story()
    story.step(0.0)
    end = simple(story, 0.0, profiled=False)
    story.step(end)
    story.step(simple(story, end, slower=2.0))
    step = story.read(range(1, 2), range(1, 2))
    assert sum(values.get("host_us", 0.0) for _, values in step.rows) == pytest.approx(100.0, abs=0.5)


def test_a_kernels_duration_is_the_median_over_the_captured_steps():
    story = Story()
    story.step(0.0)
    end = simple(story, 0.0, profiled=False)
    story.step(end)
    for kernel_us in (10.0, 30.0, 12.0):
        end = simple(story, end, kernel_us)
        story.step(end)
    step = story.read(range(1, 2), range(1, 4))
    first = rows(step, Kind.COMPUTE)[0][1]
    assert first["duration_us"] == pytest.approx(12.0 + 5.0)  # and the way from the call's end to the kernel's begin
    assert not any("changed" in note for note in step.notes)


def test_steps_whose_communication_changes_are_named():
    story = Story()
    story.step(0.0)
    end = simple(story, 0.0, profiled=False)
    story.step(end)
    story.step(end := simple(story, end))
    story.own(end + 1, end + 2, all_reduce)
    story.step(simple(story, end + 3))
    step = story.read(range(1, 2), range(1, 3))
    assert any("communication of the captured steps still changed" in note for note in step.notes)
    assert len(rows(step, Kind.COLLECTIVE)) == 2


def test_a_host_wait_is_a_sync_and_no_host_time():
    story = Story()
    story.step(0.0)
    story.own(10, 11, tag=live.SYNC)
    story.own(500, 501)
    story.step(510)
    story.launch("long", 515, (520, 1000))
    story.own(520, 521, tag=live.SYNC)
    story.call("cudaDeviceSynchronize", 522, 1004)
    story.own(1005, 1006)
    story.step(1015)
    step = story.read(range(1, 2), range(1, 2))
    assert [kind for kind, _ in step.rows][2:-2] == [Kind.SYNC]
    host = sum(values.get("host_us", 0.0) for _, values in step.rows)
    assert host == pytest.approx(10 + 1 + 5 + 9, abs=1.0)  # around the wait, and the 5 us after the kernel had ended


def test_a_wait_for_what_the_step_before_launched_is_no_host_time_either():
    story = Story()
    story.step(0.0)
    for _ in range(3):
        begin = story.boundaries[-1].at_ns / 1e3
        story.own(begin + 1, begin + 2, tag=live.SYNC)
        story.call("cudaDeviceSynchronize", begin + 3, begin + 400)
        story.own(begin + 401, begin + 402)
        story.launch("long", begin + 410, (begin + 413, begin + 420 + 400))
        story.step(begin + 420)
    step = story.read(range(1, 2), range(2, 3))
    host = sum(values.get("host_us", 0.0) for _, values in step.rows)
    assert host == pytest.approx(2 + 1 + 18, abs=1.0)


def test_a_launch_that_waited_for_room_in_the_queue_counts_as_an_ordinary_one():
    story = Story()
    story.step(0.0)
    story.step(100.0)
    for i in range(9):
        story.launch("k", 100 + 10 * i, (103 + 10 * i, 104 + 10 * i))
    story.launch("k", 190, (1203, 1204), took=1010.0)
    story.step(1210.0)
    step = story.read(range(1, 2), range(1, 2))
    assert sum(values.get("host_us", 0.0) for _, values in step.rows) <= 110.0


def test_phases_follow_the_marks():
    story = Story()
    story.step(0.0)
    for _ in range(2):
        begin = story.boundaries[-1].at_ns / 1e3
        story.launch("forward", begin + 1, (begin + 4, begin + 5))
        story.own(begin + 10, begin + 11, tag=live.BACKWARD)
        story.launch("backward", begin + 12, (begin + 15, begin + 16))
        story.own(begin + 20, begin + 21, tag=live.BACKWARD_END)
        story.own(begin + 22, begin + 23, tag=live.OPTIMIZER)
        story.launch("adam", begin + 24, (begin + 27, begin + 28))
        story.own(begin + 30, begin + 31, tag=live.OPTIMIZER_END)
        story.step(begin + 32)
    step = story.read(range(1, 2), range(1, 2))
    phases = [values["phase"] for _, values in rows(step, Kind.COMPUTE)]
    assert phases == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]


def test_what_a_callback_launches_runs_on_the_communications_stream():
    story = Story()
    other = story.recorder.program.new_stream("comm:world")
    story.step(0.0)
    for _ in range(2):
        begin = story.boundaries[-1].at_ns / 1e3
        story.own(begin + 1, begin + 2, tag=live.ON_STREAM, number=other)
        story.launch("decompress", begin + 3, (begin + 6, begin + 7))
        story.own(begin + 10, begin + 11, tag=live.ON_STREAM, number=-1)
        story.launch("after", begin + 12, (begin + 15, begin + 16))
        story.step(begin + 20)
    step = story.read(range(1, 2), range(1, 2))
    streams = [values["stream"] for _, values in rows(step, Kind.COMPUTE)]
    assert streams[0] == other and streams[1] != other
