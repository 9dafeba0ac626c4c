"""What the report says of where operation times are from: shares of the time in kernels, versions, guesses."""

from __future__ import annotations

import pytest
from test_database import H200, add, product, row

from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.ops import OpSignature, OpTable, TensorMeta
from echo_hooks.graph.program import Kind, ProgramBuilder
from echo_hooks.graph.rundir import RankTrace
from echo_hooks.timing import Pricing, estimate, fill_durations
from echo_hooks.timing.database import Database
from echo_hooks.timing.pricing import recorded_host_speed
from echo_hooks.timing.sources import host_slowness, notes, shares_of_guesses, slow_hosts

UNKNOWN = OpSignature("mylib.op.default", (TensorMeta((1 << 20,), "float32"),), bytes_read=4 << 20, call='[["T"],{}]')


def trace_of(*signatures: OpSignature) -> RankTrace:
    builder, ops = ProgramBuilder(), OpTable()
    for signature in signatures:
        builder.append(Kind.COMPUTE, op=ops.add(signature))
    program = builder.program()
    return RankTrace(0, program, program.slice(0, 0), ops.signatures, GroupTable(), memory_events={})


def test_shares_and_versions():
    trace = trace_of(product(64), product(64), add(1024, 1024), UNKNOWN)
    known_us = estimate(add(1024, 1024), H200).duration_us + estimate(UNKNOWN, H200).duration_us
    measured_us = known_us / 2.0  # twice in the program: half of all
    pricing = Pricing(H200, [Database([row(product(64), measured_us - H200.launch_overhead_us)])])
    fill_durations(trace, pricing)
    shares, versions = notes([trace], pricing, {"torch": "2.13.0+cpu"})
    assert shares.startswith("time in kernels: 50.0% profiled (database), ") and "modelled (roofline)" in shares
    assert versions == ("operations measured with torch 2.11.0, CUDA 13.0, cuDNN 91900; this run's torch is 2.13.0+cpu")
    assert "this run's" not in notes([trace], pricing, {"torch": "2.11.0+cu130"})[-1]
    share = estimate(UNKNOWN, H200).duration_us / (2 * known_us)
    assert shares_of_guesses([trace]) == {"mylib.op.default": pytest.approx(share)}


def test_a_run_that_was_executed_has_nothing_to_say():
    assert notes([trace_of(product(64))], None, {}) == []
    assert shares_of_guesses([trace_of()]) == {}


def test_a_host_that_was_slow_while_a_rank_was_measured():
    reference = {"python_us": 0.1, "dispatch_us": 3.0, "module_us": 50.0, "launch_us": 6.0}
    usual, slow = trace_of(product(64)), trace_of(product(64))
    usual.host_speed = {"dispatch_us": 3.3, "launch_us": 6.6, "python_us": 0.11}
    assert slow_hosts([usual], reference) == [] == slow_hosts([trace_of(product(64))], reference)
    slow.rank, slow.host_speed = 3, {"dispatch_us": 6.0, "launch_us": 7.2, "python_us": 0.25}
    (said,) = slow_hosts([usual, slow], reference)
    assert said.startswith("while rank 3 was measured, this machine's host was 2.0 times as slow")
    assert "dispatch 6 against 3 us, launch 7.2 against 6 us, python 0.25 against 0.1 us" in said
    assert "--host-speed 2.0" in said


def test_the_shipped_database_knows_its_host():
    assert set(recorded_host_speed(H200)) == {"python_us", "dispatch_us", "module_us", "launch_us"}


def test_how_slow_the_tracing_host_is():
    reference = {"python_us": 0.1, "dispatch_us": 3.0, "launch_us": 6.0}
    traces = [trace_of(product(64)) for _ in range(3)]
    assert host_slowness(traces, reference) == 1.0 == host_slowness([], {})
    traces[0].host_speed = {"python_us": 0.2, "dispatch_us": 6.0}
    traces[1].host_speed = {"python_us": 0.16, "dispatch_us": 3.0, "launch_us": 60.0}  # no launch is traced
    assert host_slowness(traces, reference) == pytest.approx((2.0 + 1.6**0.5) / 2)
    assert host_slowness(traces, {}) == 1.0
