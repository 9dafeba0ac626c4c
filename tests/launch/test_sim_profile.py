"""echo-sim profile: merge, show, check and train on real files; record refuses what it cannot do."""

from __future__ import annotations

import json

import pytest
import torch

from echo_hooks.graph.ops import OpSignature, TensorMeta
from echo_hooks.graph.rundir import ops_table, write_table
from echo_hooks.hardware.accelerator import load_accelerator
from echo_hooks.timing import training
from echo_hooks.timing.database import Database, Measurement, read_database, write_database
from echo_hooks.timing.roofline import estimate
from echo_launch import sim_profile
from echo_launch.sim import main

H200 = load_accelerator("h200-sxm")


def product(m: int) -> OpSignature:
    a, b, c = (TensorMeta(shape, "bfloat16") for shape in ((m, 256), (256, 512), (m, 512)))
    read, written = 512 * (m + 512), 1024 * m
    return OpSignature("aten.mm.default", (a, b), (c,), 2 * m * 512 * 256, read, written, call='[["T","T"],{}]')


def measured(m: int, factor: float = 2.0, device: str = H200.product) -> Measurement:
    time_us = factor * estimate(product(m), H200).duration_us
    return Measurement(product(m), device, "2.11.0", "13.0", "91900", "cold", 5, time_us, time_us, time_us, time_us, 1)


@pytest.fixture
def files(tmp_path):
    paths = tmp_path / "a.parquet", tmp_path / "b.parquet"
    write_database(paths[0], Database([measured(256 * i) for i in range(1, 31)], [{"device": H200.product}]))
    write_database(
        paths[1], Database([measured(256 * i) for i in range(20, 41)], [], [("aten.sort.default", "no", "1")])
    )
    return paths


def fails(capsys, *words) -> str:
    assert main([str(word) for word in words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("echo-sim: ") and err.count("\n") == 1
    return err


def test_merge_and_show(files, tmp_path, capsys):
    merged = tmp_path / "m.parquet"
    assert main(["profile", "merge", *map(str, files), "-o", str(merged)]) == 0
    assert len(read_database(merged).rows) == 40
    capsys.readouterr()
    assert main(["profile", "show", str(merged)]) == 0
    shown = capsys.readouterr().out
    assert "gemm" in shown and "not measured: aten.sort.default (1): no" in shown
    assert main(["profile", "show", str(merged), "--op", "mm"]) == 0
    assert "bfloat16[256,256]" in capsys.readouterr().out
    assert main(["profile", "show", str(merged), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["classes"] == {"gemm": {"operations": 40, "measurements": 40}}
    assert "no such operation" in fails(capsys, "profile", "show", merged, "--op", "nope")
    assert "no such file" in fails(capsys, "profile", "show", tmp_path / "nope.parquet")


def test_check_and_train(files, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(training, "ROUNDS", 40)
    assert main(["profile", "check", str(files[0])]) == 0
    shown = capsys.readouterr().out
    assert "30 measurements, all of them sound" in shown and "h200-sxm" in shown and "gemm" in shown
    assert main(["profile", "check", str(files[0]), "--json"]) == 0
    (gemm,) = json.loads(capsys.readouterr().out)["hold_out"]["h200-sxm"]
    assert gemm["name"] == "gemm" and gemm["learned"] < 0.1 < gemm["roofline"]
    assert main(["profile", "train", str(files[0]), "-o", str(tmp_path / "model")]) == 0
    assert json.loads((tmp_path / "model.json").read_text())["classes"] == ["gemm"]


def test_training_needs_one_known_device(tmp_path, capsys):
    path = tmp_path / "p.parquet"
    write_database(path, Database([measured(256, device="NVIDIA Toaster")]))
    assert main(["profile", "check", str(path)]) == 0
    assert "nothing can be learned" in capsys.readouterr().out
    assert "it has none" in fails(capsys, "profile", "train", path, "-o", tmp_path / "m")


def test_record_refuses_in_a_sentence(files, tmp_path, capsys):
    out = tmp_path / "o.parquet"
    assert "nothing to measure" in fails(capsys, "profile", "record", "-o", out)
    assert "--budget-s 0" in fails(capsys, "profile", "record", files[0], "-o", out, "--budget-s", "0")
    assert "hot" in fails(capsys, "profile", "record", files[0], "-o", out, "--conditions", "cold,hot")
    assert "no such run directory" not in fails(capsys, "profile", "record", tmp_path / "nope", "-o", out)
    ops = tmp_path / "00000.ops.parquet"
    write_table(ops, ops_table([product(256)]))
    if not torch.cuda.is_available():
        assert "no CUDA device" in fails(capsys, "profile", "record", ops, "-o", out)
    files[0].write_bytes(b"PAR1")
    assert "not a readable Parquet file" in fails(capsys, "profile", "record", ops, "-o", files[0])


def test_a_source_gives_the_local_operations_of_a_rank(tmp_path):
    ops = tmp_path / "00000.ops.parquet"
    write_table(ops, ops_table([product(256), OpSignature("all_reduce"), OpSignature("step_begin")]))
    assert sim_profile._source(ops) == ([product(256)], [1.0])
