"""Program signatures: what makes two ranks equal, and what does not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from layouts import Layout, table_of, trace_of

from echo_hooks.compose.roles import assign_roles, program_signature, rank_facts
from echo_hooks.errors import UsageError
from echo_hooks.graph.merge import merge_groups
from echo_hooks.graph.ops import OpSignature, TensorMeta
from echo_hooks.graph.program import HOST_STREAM, Kind
from echo_hooks.graph.roles import group_for

LAYOUT = Layout(16, tp=2, pp=4)


def test_ranks_of_one_stage_are_equal_and_stages_differ():
    signatures = [program_signature(trace_of(rank, LAYOUT)) for rank in range(16)]
    assert len(set(signatures)) == 4
    assert all(signatures[rank] == signatures[rank // 4 * 4] for rank in range(16))


def test_stable_over_processes_and_versions():
    # Computed once and written down: a change means that the ranks of an older run are no longer comparable.
    assert program_signature(trace_of(0, LAYOUT)).hex() == "77ce45e12dad7a5854256422b308224f"


@pytest.mark.parametrize(
    "column, value", [("host_us", 1e6), ("module", 0), ("phase", 2), ("microbatch", 3), ("site", 0)]
)
def test_times_and_labels_do_not_count(column, value):
    trace = trace_of(5, LAYOUT)
    before = program_signature(trace)
    trace.program.columns[column] = np.full_like(trace.program.columns[column], value)
    assert program_signature(trace) == before


@pytest.mark.parametrize(
    "column", ["kind", "stream", "event", "thread", "op", "group", "bytes", "peer", "batch", "dtype"]
)
def test_what_the_device_does_counts(column):
    trace = trace_of(5, LAYOUT)
    before = program_signature(trace)
    changed = trace.program.columns[column].copy()
    record = int(np.flatnonzero(trace.program.kind == Kind.SEND)[0])
    changed[record] = {"kind": Kind.RECV, "op": 0, "group": 0, "peer": 0, "dtype": 0}.get(column, 7)
    trace.program.columns[column] = changed
    assert program_signature(trace) != before


def test_buffers_of_set_up_do_not_count():
    """The root of a scatter holds a list that the others do not; before the step that makes no other role."""
    trace = trace_of(5, LAYOUT)
    before = program_signature(trace)
    broadcast = int(trace.prologue.op[trace.prologue.kind == Kind.COLLECTIVE][0])
    listed = (TensorMeta((9,), "bfloat16"),) * 3
    trace.ops.append(replace(trace.ops[broadcast], inputs=listed))
    trace.prologue.columns["op"] = np.full_like(trace.prologue.op, len(trace.ops) - 1)
    assert program_signature(trace) == before


def test_tags_count_on_the_host_only():
    trace = trace_of(5, LAYOUT)
    before = program_signature(trace)
    trace.program.columns["tag"] = np.arange(len(trace.program), dtype=np.int32)
    assert program_signature(trace) == before
    trace.program.columns["stream"] = np.full(len(trace.program), HOST_STREAM, np.int32)
    on_host = program_signature(trace)
    trace.program.columns["tag"] = np.zeros(len(trace.program), np.int32)
    assert program_signature(trace) != on_host


def test_numbers_of_events_batches_and_streams_count_by_first_use():
    trace = trace_of(5, LAYOUT)
    length = len(trace.program)
    trace.program.columns["event"] = np.arange(length) % 3
    trace.program.columns["batch"] = np.full(length, 4, np.int32)
    trace.program.columns["stream"] = np.arange(length, dtype=np.int32) % 2
    before = program_signature(trace)
    trace.program.columns["event"] = np.arange(length) % 3 + 1000
    trace.program.columns["batch"] = np.full(length, 9, np.int32)
    trace.program.columns["stream"] = np.arange(length, dtype=np.int32) % 2 * 5
    assert program_signature(trace) == before
    trace.program.columns["event"] = (np.arange(length) + 1) // 2
    assert program_signature(trace) != before


def test_shapes_count():
    trace = trace_of(0, LAYOUT)
    other = replace(trace, ops=[*trace.ops[:-1], OpSignature("other", (TensorMeta((1,), "int8"),))])
    other.ops[1] = OpSignature(trace.ops[1].name, (TensorMeta((4, 5), "bfloat16"),))
    assert program_signature(other) != program_signature(trace)


def test_communication_before_the_step_counts():
    trace = trace_of(0, LAYOUT)
    silent = replace(trace, prologue=trace.prologue.slice(0, 0))
    assert program_signature(silent) != program_signature(trace)


def test_a_long_program_is_hashed_by_columns():
    trace = trace_of(0, LAYOUT)
    repeated = {name: np.tile(column, 20_000) for name, column in trace.program.columns.items()}
    long = replace(trace, program=replace(trace.program, columns=repeated))
    assert len(long.program) > 100_000
    assert program_signature(long) != program_signature(trace)


def test_facts_name_groups_of_sends_and_roots():
    trace = trace_of(5, LAYOUT)
    facts = rank_facts(trace)
    assert {trace.groups[i].name for i in facts.point_to_point} == {"pp"}
    assert {(trace.groups[i].name, root) for i, root in facts.roots} == {("world", 0), ("tp", 4)}
    assert not facts.hands_on
    assert rank_facts(trace_of(5, replace(LAYOUT, integers=True))).hands_on


def test_one_trace_stands_for_a_data_parallel_world():
    trace = trace_of(0, Layout(32))
    (role,) = assign_roles({0: trace}, trace.groups, 32)
    assert (role.name, role.traced_rank, role.ranks, role.proven) == ("all", 0, tuple(range(32)), (0,))
    assert "collectives only" in role.why


def test_one_trace_cannot_stand_for_other_stages():
    trace = trace_of(0, LAYOUT)
    with pytest.raises(UsageError, match=r"4-15.*--trace-ranks"):
        assign_roles({0: trace}, trace.groups, 16)


def test_every_member_of_a_role_has_the_groups_its_program_uses():
    layout = Layout(24, tp=2, pp=3, embedding=True)
    traces = {rank: trace_of(rank, layout) for rank in (0, 8, 23)}
    groups = merge_groups(traces.values())
    for role in assign_roles(traces, groups, 24):
        used = np.unique(traces[role.traced_rank].program.group)
        for rank in role.ranks:
            for index in used[used >= 0]:
                assert rank in group_for(groups, groups[int(index)], rank).ranks


def test_uneven_groups_are_different_classes():
    table = table_of(Layout(5))
    for ranks in ((0, 1, 2), (3, 4)):
        table.add(ranks, desc="uneven", site="x.py:1")
    traces = {}
    for rank in (0, 3):
        traces[rank] = replace(trace_of(rank, Layout(5)), groups=table)
    roles = assign_roles(traces, table, 5)
    assert len(roles) == 1  # equal programs: the class was told apart, then found equal
    with pytest.raises(UsageError, match="3-4"):
        assign_roles({0: traces[0]}, table, 5)
