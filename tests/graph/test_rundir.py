"""The run directory: what is written is read back; damaged and hostile files end in one sentence."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from echo_hooks.errors import UsageError
from echo_hooks.graph.ops import OpSignature, TensorMeta
from echo_hooks.graph.program import COLUMNS, Kind
from echo_hooks.graph.recorder import Recorder
from echo_hooks.graph.roles import MemorySummary, Role
from echo_hooks.graph.rundir import (
    RankTrace,
    read_run,
    read_trace,
    write_groups,
    write_manifest,
    write_roles,
    write_trace,
)


@pytest.fixture
def run(tmp_path):
    recorder = Recorder(0, 2)
    recorder.groups.add((0, 1), name="world", site="train.py:3")
    recorder.copy(recorder.ops.add(OpSignature("copy_host_to_device")), 8)
    recorder.sync(stream=0)
    recorder.mark("step_begin", 1)
    gemm = OpSignature(
        "aten.mm.default", (TensorMeta((4, 8), "bfloat16"),), (TensorMeta((4, 4), "bfloat16", False),), 256, 64, 32
    )
    recorder.compute(recorder.ops.add(gemm))
    recorder.communication(
        Kind.COLLECTIVE,
        OpSignature("all_reduce", attrs=(("reduce", "sum"), ("input_splits", (1, 2)))),
        group=0,
        bytes=32,
        dtype="bfloat16",
        seq=recorder.next_seq(0),
    )
    whole = recorder.program.program()
    recorder.memory.append(1, 0, 512, 0, 3, 0, 0)
    trace = RankTrace(
        0,
        whole.slice(2, 5),
        whole.slice(0, 2),
        recorder.ops.signatures,
        recorder.groups,
        recorder.memory.columns(),
        MemorySummary(512, 2 << 20, {"activations": 512}),
        notes=["a note"],
        tokens_per_step=7,
    )
    write_trace(tmp_path, trace)
    write_groups(tmp_path, recorder.groups)
    write_roles(tmp_path, [Role("all", 0, (0, 1), (0,), "assumed", trace.memory)])
    write_manifest(tmp_path, {"world_size": 2})
    return tmp_path, trace


def test_round_trip(run):
    directory, trace = run
    read = read_run(directory)
    again = read.traces[0]
    assert again.ops == trace.ops
    assert again.memory == trace.memory
    assert again.notes == ["a note"] and again.tokens_per_step == 7
    assert read.groups.groups == trace.groups.groups
    assert read.roles[0].ranks == (0, 1)
    assert (len(again.prologue), len(again.program)) == (2, 3)
    for name in COLUMNS:
        if name in ("dtype", "module", "site"):  # codes may differ, texts may not
            texts = [[p.strings[i] for i in p.columns[name]] for p in (trace.program, again.program)]
            assert texts[0] == texts[1]
        else:
            np.testing.assert_array_equal(again.program.columns[name], trace.program.columns[name])
    assert again.memory_events["bytes"].tolist() == [512]


def test_same_input_same_bytes(run, tmp_path_factory):
    directory, trace = run
    other = tmp_path_factory.mktemp("other")
    write_trace(other, trace)
    for name in ("00000.parquet", "00000.ops.parquet", "00000.memory.parquet"):
        assert (directory / "ranks" / name).read_bytes() == (other / "ranks" / name).read_bytes()


@pytest.mark.parametrize("name", ["groups.parquet", "ranks/00000.parquet", "ranks/00000.ops.parquet", "roles.json"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "missing", "wrong kind"])
def test_damaged_files_are_named(run, name, damage):
    directory, _ = run
    path = directory / name
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"truncated": data[: len(data) // 2], "empty": b"", "wrong kind": b"GIF89a" * 50}[damage])
    with pytest.raises(UsageError, match=path.name):
        read_run(directory)


def test_without_a_manifest_it_is_no_run(run):
    directory, _ = run
    (directory / "manifest.json").unlink()
    with pytest.raises(UsageError, match="not finished"):
        read_run(directory)


@pytest.mark.parametrize("manifest", [{"format": 2, "world_size": 2}, {"format": 1}, {"format": 1, "world_size": "2"}])
def test_other_formats_are_refused(run, manifest):
    directory, _ = run
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match=r"manifest\.json"):
        read_run(directory)


@pytest.mark.parametrize(("column", "value"), [("op", 99), ("group", 5), ("kind", 77), ("stream", -9), ("op", -2)])
def test_wild_indices_are_refused(run, column, value):
    directory, trace = run
    trace.program.columns[column][0] = value
    write_trace(directory, trace)
    with pytest.raises(UsageError, match=column):
        read_trace(directory, 0)


def test_deeply_nested_json_is_refused(run):
    directory, _ = run
    (directory / "roles.json").write_text("[" * 100_000)
    with pytest.raises(UsageError, match=r"roles\.json"):
        read_run(directory)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("host_speed", {"python_us": float("inf")}),
        ("host_speed", {"python_us": -0.1}),
        ("host_speed", {"python_us": "quick"}),
        ("host_speed", [0.1]),
        ("profiled_step_ms", float("nan")),
        ("tallies", [1]),
    ],
)
def test_metadata_that_make_no_sense_are_refused(run, field, value):
    directory, _ = run
    path = directory / "ranks" / "00000.parquet"
    table = pq.read_table(path)
    meta = json.loads(table.schema.metadata[b"echo"]) | {field: value}
    pq.write_table(table.replace_schema_metadata({"echo": json.dumps(meta)}), path)
    with pytest.raises(UsageError, match="not a rank program"):
        read_trace(directory, 0)
