"""Host time of records: the script's own, by a clock that the test turns."""

from __future__ import annotations

import threading

import pytest
import torch

from echo_hooks.capture.capture import Capture
from echo_hooks.capture.overhead import entry_overhead_ns
from echo_hooks.devices.allocator import CachingAllocator
from echo_hooks.graph.program import Kind
from echo_hooks.graph.recorder import Recorder

pytestmark = pytest.mark.usefixtures("stage")


class Clock:
    """Stands still but for ``spend``."""

    def __init__(self):
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def spend(self, us: float) -> None:
        self.now_ns += round(us * 1000)


@pytest.fixture
def clock(echo):
    clock = Clock()
    echo.recorder.clock_ns = clock
    echo.recorder.host_ns = echo.recorder._left_ns = 0
    echo.recorder.overhead_ns = 0
    return clock


def test_each_record_takes_the_time_since_the_one_before(echo, clock):
    clock.spend(5)
    tensor = torch.zeros(8, 8, device="cuda")
    clock.spend(3)
    tensor.view(64)  # no record: its share goes to the next
    clock.spend(4)
    tensor.add_(1)
    clock.spend(2)
    torch.cuda.synchronize()
    assert echo.program.kind.tolist() == [Kind.COMPUTE, Kind.COMPUTE, Kind.SYNC]
    assert echo.program.host_us.tolist() == [5, 7, 2]


def test_time_inside_echo_does_not_count(echo, clock):
    with echo.recorder.own_time():
        clock.spend(100)
    clock.spend(1)
    with echo.recorder.own_time():
        clock.spend(50)
        torch.zeros(1, device="cuda")
    assert echo.program.host_us.tolist() == [1]


def test_the_way_into_the_mode_is_taken_out(echo, clock):
    echo.recorder.overhead_ns = 2000
    clock.spend(10)
    tensor = torch.zeros(1, device="cuda")
    clock.spend(1)  # less than the overhead: never negative
    tensor.add_(1)
    assert echo.program.host_us.tolist() == [8, 0]


def test_other_threads_neither_read_nor_write_the_clock(echo, clock):
    clock.spend(10)
    thread = threading.Thread(target=lambda: [clock.spend(50), torch.zeros(1, device="cuda").add_(1), clock.spend(50)])
    thread.start()
    thread.join()
    torch.zeros(1, device="cuda")
    assert echo.program.thread.tolist() == [1, 1, 0]
    assert echo.program.host_us.tolist() == [0, 0, 110]


def test_overhead_is_measured_once_and_leaves_no_trace(stage):
    recorder, allocator = Recorder(0, 8), CachingAllocator(80 << 30)
    stage.device.retarget(recorder, 0, allocator)
    overhead = entry_overhead_ns(Capture(recorder, allocator, stage.planner, 1, 1))
    assert 0 <= overhead < 1_000_000
    assert len(recorder.program) == 0
