"""The profile database: written and read back, merged, looked up; hostile files end in one sentence."""

from __future__ import annotations

import dataclasses
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from echo_hooks.errors import UsageError
from echo_hooks.graph.ops import OpSignature, TensorMeta
from echo_hooks.graph.program import Evidence
from echo_hooks.hardware.accelerator import load_accelerator
from echo_hooks.timing import database as module
from echo_hooks.timing.database import Database, Measurement, key_of, merge, read_database, write_database
from echo_hooks.timing.pricing import Price, Pricing, load_pricing
from echo_hooks.timing.roofline import estimate

H200 = load_accelerator("h200-sxm")


def product(m: int, n: int = 512, k: int = 256, call: str = '[["T","T"],{}]') -> OpSignature:
    a, b, c = (TensorMeta(shape, "bfloat16") for shape in ((m, k), (k, n), (m, n)))
    return OpSignature("aten.mm.default", (a, b), (c,), 2 * m * n * k, 2 * (m * k + k * n), 2 * m * n, call=call)


def add(*shape: int) -> OpSignature:
    meta = TensorMeta(shape, "float32")
    size = 4 * shape[0] * shape[-1]
    return OpSignature("aten.add.Tensor", (meta, meta), (meta,), 0, 2 * size, size, call='[["T","T"],{}]')


def row(signature: OpSignature, median_us: float = 10.0, **values) -> Measurement:
    made = (
        dict(device=H200.product, torch="2.11.0", cuda="13.0", cudnn="91900", condition="cold", samples=5, kernels=1)
        | values
    )
    times = dict(median_us=median_us, p10_us=median_us, p90_us=median_us, busy_us=median_us)
    return Measurement(signature, kernel_names=(("gemm", 1),), **(times | made))


def test_a_database_comes_back_as_it_was(tmp_path):
    path = tmp_path / "p.parquet"
    database = Database(
        [row(product(64), 3.5, p10_us=3.0, p90_us=4.0, kernels=2), row(add(4, 8), condition="warm")],
        [{"device": H200.product, "host_speed": {"python_us": 0.1}}],
        [("aten.sort.default", "it broke", "ab12")],
    )
    write_database(path, database)
    assert read_database(path) == database


def test_merging_keeps_one_row_of_a_key_device_versions_and_condition():
    few, many = row(product(64), 10.0, samples=3), row(product(64), 12.0, samples=7)
    other = row(product(64), 9.0, torch="2.12.0")
    merged = merge([Database([many], [{"a": 1}]), Database([few, other], [{"a": 1}, {"b": 2}])])
    assert merged.rows == [many, other]
    assert merged.recordings == [{"a": 1}, {"b": 2}]


def test_keys():
    assert key_of(add(4, 8)) == key_of(add(8, 4)) != key_of(add(4, 4))
    assert key_of(product(64)) != key_of(product(64, call='[["T",["T",1,256]],{}]'))
    read_along_rows = dataclasses.replace(add(4, 8), call='[["T",{"L":[0]}],{}]')
    assert key_of(read_along_rows) != key_of(dataclasses.replace(add(8, 4), call='[["T",{"L":[0]}],{}]'))


# ---- looking up ----


def test_a_measured_operation_is_profiled_and_another_modelled():
    pricing = Pricing(H200, [Database([row(product(64), 10.0)])])
    assert pricing.price(product(64)) == Price(
        10.0 + H200.launch_overhead_us, Evidence.PROFILED, "database", slows=True
    )
    other = pricing.price(product(128))
    assert other == Price(estimate(product(128), H200).duration_us, Evidence.MODELLED, "roofline")
    assert list(pricing.versions) == [("2.11.0", "13.0", "91900")]


def test_the_users_database_comes_first_and_other_devices_do_not_count():
    users = Database([row(product(64), 5.0), row(product(32), 1.0, device="NVIDIA Other")])
    pricing = Pricing(H200, [users, Database([row(product(64), 10.0), row(product(32), 7.0)])])
    assert pricing.price(product(64)).duration_us == 5.0 + H200.launch_overhead_us
    assert pricing.price(product(32)).duration_us == 7.0 + H200.launch_overhead_us


def test_an_operation_in_no_class_is_assumed():
    unknown = OpSignature("mylib.op.default", (TensorMeta((8,), "float32"),), call='[["T"],{}]')
    assert Pricing(H200).price(unknown).evidence == Evidence.ASSUMED


def test_cold_counts_before_loaded():
    rows = [
        row(product(64), 12.0, condition="loaded"),
        row(product(64), 10.0),
        row(product(32), 8.0, condition="loaded"),
        row(add(64, 64), 5.0),
    ]
    pricing = Pricing(H200, [Database(rows)])
    pause = H200.launch_overhead_us
    assert pricing.price(product(64)) == Price(10.0 + pause, Evidence.PROFILED, "database", slows=True)
    # Measured on a loaded device alone, it is slow already; what is no product is not slowed by the clock.
    assert pricing.price(product(32)) == Price(8.0 + pause, Evidence.PROFILED, "database", slows=False)
    assert not pricing.price(add(64, 64)).slows


def test_timings():
    assert load_pricing(H200, "model")._tables == []
    assert len(load_pricing(H200, "auto")._tables) == len(load_pricing(H200, "profile")._tables) == 1
    assert load_pricing(load_accelerator("a100-80gb"), "profile")._tables == []
    with pytest.raises(UsageError, match="timing 'fast': known are auto"):
        load_pricing(H200, "fast")


# ---- hostile files ----


def table_of(path, **changes) -> pa.Table:
    write_database(path, Database([row(product(64))]))
    table = pq.read_table(path)
    for name, value in changes.items():
        table = table.set_column(table.schema.get_field_index(name), name, pa.array([value]))
    return table


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"median_us": float("nan")}, "no times"),
        ({"median_us": -1.0}, "no times"),
        ({"p10_us": 1e9}, "no times"),
        ({"busy_us": float("inf")}, "no times"),
        ({"condition": "lukewarm"}, "make no sense"),
        ({"samples": 0}, "make no sense"),
        ({"kernels": -1}, "make no sense"),
        ({"inputs": "[[[1"}, "not a profile database"),
        ({"inputs": "[" * 100_000}, "not a profile database"),
        ({"attrs": "7"}, "not a profile database"),
        ({"kernel_names": '{"a":1}'}, "not a profile database"),
    ],
)
def test_a_row_that_makes_no_sense_is_refused(tmp_path, changes, why):
    path = tmp_path / "p.parquet"
    pq.write_table(table_of(path, **changes), path)
    with pytest.raises(UsageError, match=why):
        read_database(path)


def test_files_that_are_no_database(tmp_path, monkeypatch):
    path = tmp_path / "p.parquet"
    with pytest.raises(UsageError, match="no such file"):
        read_database(path)
    path.write_bytes(b"")
    with pytest.raises(UsageError, match="not a readable Parquet file"):
        read_database(path)
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(UsageError, match="it lacks"):
        read_database(path)
    table = table_of(path)
    for meta in ({}, {"format": 99}, {"format": 1, "recordings": 7, "unmeasured": []}, []):
        pq.write_table(table.replace_schema_metadata({"echo": json.dumps(meta)}), path)
        with pytest.raises(UsageError, match=r"profile format|not a profile database"):
            read_database(path)
    write_database(path, Database([row(product(64))]))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match="not a readable Parquet file"):
        read_database(path)
    path.write_bytes(whole)
    monkeypatch.setattr(module, "MAX_UNPACKED_BYTES", 10)
    with pytest.raises(UsageError, match="bytes unpacked"):
        read_database(path)
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 10)
    with pytest.raises(UsageError, match="larger than 10 bytes"):
        read_database(path)


def test_a_database_of_another_parquet_writer_with_wrong_types(tmp_path):
    path = tmp_path / "p.parquet"
    pq.write_table(table_of(path, samples="many"), path)
    with pytest.raises(UsageError, match=r"p\.parquet"):
        read_database(path)
