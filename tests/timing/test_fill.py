import numpy as np
import pytest

from echo_hooks.errors import UsageError
from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.ops import OpSignature, OpTable, TensorMeta
from echo_hooks.graph.program import Evidence, Kind, ProgramBuilder
from echo_hooks.graph.rundir import RankTrace
from echo_hooks.hardware.accelerator import load_accelerator
from echo_hooks.timing import estimate, fill_durations

X = TensorMeta((1024, 1024), "bfloat16")


def signature(name: str) -> OpSignature:
    return OpSignature(name, (X, X), (X,), 0, 4 << 20, 2 << 20)


def trace_of(*records) -> RankTrace:
    """``records``: (kind, op name or None for no op)."""
    builder, ops = ProgramBuilder(), OpTable()
    for kind, name in records:
        builder.append(kind, op=-1 if name is None else ops.add(signature(name)))
    program = builder.program()
    return RankTrace(3, program, program.slice(0, 0), ops.signatures, GroupTable(), memory_events={})


def test_only_local_device_work_is_filled():
    device = load_accelerator("h100-sxm")
    trace = trace_of(
        (Kind.COMPUTE, "aten.add.Tensor"),
        (Kind.COLLECTIVE, "all_reduce"),
        (Kind.COPY, "copy_host_to_device"),
        (Kind.COMPUTE, "aten.add.Tensor"),
        (Kind.HOST, None),
        (Kind.SYNC, None),
    )
    assert fill_durations(trace, device) == []
    add, copy = (estimate(signature(n), device).duration_us for n in ("aten.add.Tensor", "copy_host_to_device"))
    np.testing.assert_array_equal(trace.program.duration_us, [add, np.nan, copy, add, np.nan, np.nan])
    modelled, none = Evidence.MODELLED, Evidence.NONE
    assert trace.program.evidence.tolist() == [modelled, none, modelled, modelled, none, none]


def test_unknown_ops_are_named_once_and_marked():
    trace = trace_of(
        (Kind.COMPUTE, "mylib.attention.default"),
        (Kind.COMPUTE, "aten.add.Tensor"),
        (Kind.COMPUTE, "mylib.attention.default"),
        (Kind.COMPUTE, "other.op.default"),
    )
    assert fill_durations(trace, load_accelerator("a100-80gb")) == ["mylib.attention.default", "other.op.default"]
    assumed, modelled = Evidence.ASSUMED, Evidence.MODELLED
    assert trace.program.evidence.tolist() == [assumed, modelled, assumed, assumed]
    assert np.all(trace.program.duration_us > 0)


def test_filling_again_for_another_device_replaces():
    trace = trace_of((Kind.COMPUTE, "aten.add.Tensor"))
    fill_durations(trace, load_accelerator("a100-80gb"))
    first = trace.program.duration_us[0]
    fill_durations(trace, load_accelerator("b200"))
    assert trace.program.duration_us[0] < first


def test_an_empty_program_and_a_damaged_one():
    assert fill_durations(trace_of(), load_accelerator("h800")) == []
    with pytest.raises(UsageError, match="rank 3: record 1 is device work without an op"):
        fill_durations(trace_of((Kind.COMPUTE, "aten.add.Tensor"), (Kind.COMPUTE, None)), load_accelerator("h800"))
