"""What a device's power limit does to matrix products, by hand."""

from __future__ import annotations

import pytest
from test_database import H200, product, row

from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.ops import OpTable
from echo_hooks.graph.program import Kind, ProgramBuilder
from echo_hooks.graph.rundir import RankTrace
from echo_hooks.timing import Pricing, fill_durations
from echo_hooks.timing.clock import slowdown
from echo_hooks.timing.database import Database


def test_a_device_that_only_multiplies():
    assert slowdown(100.0, 0.0, 0.0) == pytest.approx(1.0 + 0.6 - 0.44)


def test_a_device_that_waits_keeps_its_clock():
    assert slowdown(100.0, 0.0, 200.0) == 1.0
    assert slowdown(0.0, 0.0, 0.0) == 1.0 == slowdown(0.0, 0.0, 10.0)


def test_slower_products_take_a_larger_share():
    # s = 1 + (0.6 * 100 s + 0.4 * 50) / (100 s + 50) - 0.44: 100 s^2 - 66 s - 48 = 0.
    assert slowdown(100.0, 50.0, 0.0) == pytest.approx((66 + (66**2 + 4 * 100 * 48) ** 0.5) / 200, rel=1e-5)
    # In a step of 180 us: s = 1 + (60 s + 20) / 180 - 0.44.
    assert slowdown(100.0, 50.0, 180.0) == pytest.approx((0.56 + 20 / 180) / (1 - 60 / 180), rel=1e-3)


def test_products_of_a_trace_by_what_the_step_takes():
    builder, ops = ProgramBuilder(), OpTable()
    for _ in range(4):
        builder.append(Kind.COMPUTE, op=ops.add(product(64)))
    program = builder.program()
    trace = RankTrace(0, program, program.slice(0, 0), ops.signatures, GroupTable(), memory_events={}, steps=2)
    pricing = Pricing(H200, [Database([row(product(64), 100.0 - H200.launch_overhead_us)])])
    fill_durations(trace, pricing)
    assert trace.program.duration_us == pytest.approx([116.0] * 4)
    fill_durations(trace, pricing, step_us=1000.0)  # two products in a step: a fifth of it
    assert trace.program.duration_us == pytest.approx([100.0] * 4)
    trace.program.columns["host_us"][:] = 500.0  # the host takes as long by itself
    fill_durations(trace, pricing)
    assert trace.program.duration_us == pytest.approx([100.0] * 4)
