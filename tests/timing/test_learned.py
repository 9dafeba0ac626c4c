"""The learned model: it finds what the roofline misses, the same each time, and only where it is better."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from echo_hooks.errors import UsageError
from echo_hooks.graph.ops import OpSignature, TensorMeta
from echo_hooks.hardware.accelerator import load_accelerator
from echo_hooks.timing import training
from echo_hooks.timing.database import Database, Measurement
from echo_hooks.timing.features import NAMES, feature_class, features, shape_of
from echo_hooks.timing.learned import floor_us, load_model, save_model, shipped_model
from echo_hooks.timing.roofline import estimate

H200 = load_accelerator("h200-sxm")


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(training, "ROUNDS", 60)


def product(m: int, n: int, k: int, transposed: bool = False) -> OpSignature:
    a, b = TensorMeta((m, k), "bfloat16"), TensorMeta((k, n), "bfloat16", not transposed)
    moved = 2 * (m * k + k * n)
    call = f'[["T",["T",1,{k}]],{{}}]' if transposed else '[["T","T"],{}]'
    return OpSignature(
        "aten.mm.default", (a, b), (TensorMeta((m, n), "bfloat16"),), 2 * m * n * k, moved, 2 * m * n, call=call
    )


def addition(rows: int, columns: int) -> OpSignature:
    meta = TensorMeta((rows, columns), "float32")
    size = 4 * rows * columns
    return OpSignature("aten.add.Tensor", (meta, meta), (meta,), 0, 2 * size, size, call='[["T","T"],{}]')


def measured(signature: OpSignature, factor: float, condition: str = "cold") -> Measurement:
    time_us = factor * estimate(signature, H200).duration_us - H200.launch_overhead_us
    return Measurement(
        signature, H200.product, "2.11.0", "13.0", "91900", condition, 5, time_us, time_us, time_us, 1.0, 1
    )


def invented() -> list[Measurement]:
    """Products whose n is odd take three times the roofline's time; additions exactly the roofline's."""
    rows = []
    for i in range(60):
        m, n, k = 256 * (1 + i % 7), 512 * (1 + i % 5) + (i % 2), 256 * (1 + i % 6)
        rows += [measured(product(m, n, k, t), 3.0 if i % 2 else 1.2) for t in (False, True)]
        rows.append(measured(addition(64 * (i + 1), 1024), 1.0))
    return rows


def test_what_the_roofline_misses_is_learned_for_shapes_not_seen():
    held = {h.name: h for h in training.hold_out(invented(), H200, seeds=(0,))}
    assert held["gemm"].better and held["gemm"].learned < 0.1 < held["gemm"].roofline
    assert not held["elementwise"].better  # the roofline is exact there and stays


def test_only_the_better_classes_are_used():
    model = training.trained(Database(invented()), H200)
    assert model.classes == {"gemm"}
    slow, plain = product(1280, 2049, 1536), addition(999, 1024)
    found = model.predict([slow, plain], H200)
    assert found.keys() == {slow}
    assert found[slow] == pytest.approx(3.0 * estimate(slow, H200).duration_us, rel=0.1)
    assert model.about["measured_with"] == ["torch 2.11.0, CUDA 13.0, cuDNN 91900"]


def test_training_is_deterministic():
    first, second = (bytes(training.train(invented(), H200, seed=3).booster.save_raw("ubj")) for _ in range(2))
    assert first == second
    assert training.withheld_shapes(invented(), 5) == training.withheld_shapes(list(reversed(invented())), 5)


def test_siblings_of_a_product_are_withheld_together():
    shapes = {shape_of(product(*sizes)) for sizes in ((8192, 1024, 4096), (1024, 4096, 8192), (4096, 8192, 1024))}
    assert len(shapes) == 1
    withheld = training.withheld_shapes(invented(), 0, classes=["gemm"])
    assert {s[0] for s in withheld} == {"gemm"}


def test_a_prediction_never_beats_the_peaks():
    rows = [measured(product(4096, 4096, 256 * (1 + i)), 0.05) for i in range(40)]
    fast = product(4096, 4096, 8192)
    found = training.train(rows, H200).predict([fast], H200)
    assert found[fast] == floor_us(fast, H200) == pytest.approx(2 * 4096**2 * 8192 / 989.4e12 * 1e6)


def test_features_are_numbers_with_a_name_each():
    for signature in (product(512, 768, 1024), addition(4, 8)):
        values = features(signature, H200, {"mm": 0}, loaded=False)
        assert len(values) == len(NAMES) and all(isinstance(v, float) for v in values)
    found = dict(zip(NAMES, features(product(512, 768, 1024, transposed=True), H200, {"mm": 0}, loaded=True)))
    assert (found["m"], found["transposed_a"], found["transposed_b"], found["loaded"]) == (9.0, 0.0, 1.0, 1.0)
    assert found["waves_128x256"] == pytest.approx(math.log2(4 * 3 / 132))
    assert found["fullness_128x256"] == pytest.approx(4 * 3 / 132)
    assert feature_class(OpSignature("mylib.op.default")) is None
    assert feature_class(OpSignature("copy_host_to_device")) is None


# ---- files ----


def test_a_model_comes_back_from_its_files(tmp_path):
    model = training.trained(Database(invented()), H200)
    save_model(model, tmp_path / "m")
    again = load_model(tmp_path / "m.ubj", tmp_path / "m.json")
    some = product(1280, 2049, 1536)
    assert again.predict([some], H200) == model.predict([some], H200)
    assert dataclasses.replace(again, booster=None) == dataclasses.replace(model, booster=None)


def test_files_that_are_no_model(tmp_path):
    save_model(training.train(invented(), H200), tmp_path / "m")
    trees, schema = tmp_path / "m.ubj", tmp_path / "m.json"
    whole, said = trees.read_bytes(), schema.read_text()
    with pytest.raises(UsageError, match=r"nope\.ubj"):
        load_model(tmp_path / "nope.ubj", schema)
    for damaged in (b"", whole[:100], b"\x80\x04K\x01.", whole[: len(whole) // 2]):
        trees.write_bytes(damaged)
        with pytest.raises(UsageError, match="damaged or another model"):
            load_model(trees, schema)
    trees.write_bytes(whole)
    for text in ("", "[]", "{}", json.dumps({**json.loads(said), "ops": 7})):
        schema.write_text(text)
        with pytest.raises(UsageError, match="no learned model"):
            load_model(trees, schema)
    schema.write_text(json.dumps({**json.loads(said), "features": ["m"]}))
    with pytest.raises(UsageError, match="train it anew"):
        load_model(trees, schema)


def test_shipped_models_stand_in_within_a_vendor():
    own = shipped_model(H200)
    assert own is not None and own.accelerator == "h200-sxm" and own.errors
    assert shipped_model(load_accelerator("h100-sxm")) is own
    assert shipped_model(load_accelerator("mi300x")) is None
