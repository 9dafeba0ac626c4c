"""The formula by hand, features, models that are read by content, and what the composer gets."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from echo_hooks.errors import UsageError
from echo_hooks.graph.ops import OpSignature, TensorMeta
from echo_hooks.hardware.accelerator import load_accelerator
from echo_hooks.overlap import training
from echo_hooks.overlap.features import NAMES, features
from echo_hooks.overlap.formula import formula
from echo_hooks.overlap.model import TARGETS, OverlapModel, load, save
from echo_hooks.overlap.pair import Call, Kernel
from echo_hooks.overlap.samples import UNKNOWN, Launch, Sample, medians, read_samples, write_samples
from echo_hooks.overlap.slowdowns import checked, choose
from echo_hooks.overlap.work import blocks_per_sm, bus_bytes, demand, wave_factor

H200 = load_accelerator("h200-sxm")
ALL_REDUCE = Call("all_reduce", 512 << 20, 1775.0, 24, 2, 2, "ring", "simple")


def gemm(m, n, k, run_us, launch=UNKNOWN):
    a, b, c = (TensorMeta(s, "bfloat16") for s in ((m, k), (k, n), (m, n)))
    read, written = 2 * (m * k + k * n), 2 * m * n
    return Kernel(OpSignature("aten.mm.default", (a, b), (c,), 2 * m * n * k, read, written), run_us, launch)


def pointwise(elements, run_us, name="aten.add.Tensor"):
    t = TensorMeta((elements,), "bfloat16")
    return Kernel(OpSignature(name, (t, t), (t,), 0, 4 * elements, 2 * elements), run_us)


def test_waves():
    assert wave_factor(132, 1, 132, 24) == 2.0  # one wave becomes two
    assert wave_factor(108, 1, 132, 24) == 1.0
    assert wave_factor(132_000, 1, 132, 24) == pytest.approx(1223 / 1000)  # many: the ratio of the SMs
    assert wave_factor(100, 1, 132, 0) == 1.0


def test_blocks_per_sm():
    assert blocks_per_sm(Launch(132, 384, 168, 213188)) == 1  # shared memory and registers: cuBLAS on Hopper
    assert blocks_per_sm(Launch(9999, 128, 32, 0)) == 16  # threads: 2048 / 128
    assert blocks_per_sm(Launch(9999, 256, 64, 0)) == 4  # registers: 65536 / (64 * 256)
    assert blocks_per_sm(UNKNOWN) == 0


def test_bus_bytes():
    assert bus_bytes(replace(ALL_REDUCE, bytes=800, ranks=8)) == 1400.0
    assert bus_bytes(Call("all_gather", 800, 1.0, 24, 8, 8)) == 700.0
    assert bus_bytes(Call("send", 800, 1.0, 2, 2, 2)) == 800.0


def test_a_product_of_one_wave_takes_two_beside_a_ring():
    kernel = gemm(2048, 2048, 2048, 25.6, Launch(128, 384, 168, 213188, 1))
    moving, waiting, call = formula(kernel, ALL_REDUCE, H200)
    assert moving == waiting == 2.0
    assert call >= 1.0


def test_a_call_waits_for_a_long_kernel_to_end():
    # 1433 us of a kernel on all SMs, a call of 50: each call takes one kernel, which is slowed for a small part of it.
    short = Call("all_reduce", 8 << 20, 50.0, 24, 2, 2)
    kernel = gemm(8192, 8192, 8192, 1433.0, Launch(132, 384, 168, 213188, 1))
    moving, waiting, call = formula(kernel, short, H200)
    assert 1.0 < moving < 1.05 and 1.1 < waiting < 1.3
    assert call == pytest.approx(1433.0 * (1 + 3 / 16) / 50.0, rel=0.02)


def test_hccl_leaves_the_cores_free():
    ascend = load_accelerator("ascend-910b")
    moving, waiting, _ = formula(gemm(4096, 4096, 4096, 500.0), replace(ALL_REDUCE, channels=20), ascend)
    assert waiting == 1.0 and moving < 1.2


def test_demand_without_a_profiler_comes_from_shapes():
    d = demand(gemm(4096, 2048, 8192, 173.0), H200)
    assert (d.group, d.blocks, d.persistent) == ("gemm", 32 * 8, True)
    assert d.flops_share == pytest.approx(2 * 4096 * 2048 * 8192 / 173e-6 / 989.4e12)
    d = demand(pointwise(1 << 25, 51.4), H200)
    assert d.bytes_share == pytest.approx(6 * (1 << 25) / 51.4e-6 / 4.8e12)


def test_features_hold_no_surprise():
    rows = features([(gemm(4096, 4096, 4096, 180.0), ALL_REDUCE), (pointwise(1 << 25, 51.4), ALL_REDUCE)], H200)
    assert rows.shape == (2, len(NAMES)) and len(set(NAMES)) == len(NAMES)
    launch = [i for i, name in enumerate(NAMES) if name.startswith("launch_")]
    assert np.isnan(rows[:, launch]).all()
    assert np.isfinite(np.delete(rows, launch, axis=1)).all()
    assert rows[0, NAMES.index("is_gemm")] == 1.0 and rows[1, NAMES.index("is_elementwise")] == 1.0


# ---- files ----


def sample(kernel="a", size=1 << 20, base_us=100.0, factor=1.5, call_factor=2.0, **other) -> Sample:
    given = dict(
        kernel=kernel,
        signature=pointwise(1 << 22, base_us).signature,
        launch=UNKNOWN,
        call="all_reduce",
        bytes=size,
        dtype="bfloat16",
        ranks=2,
        ranks_per_node=2,
        rank=0,
        repeat=0,
        base_us=base_us,
        overlap_us=base_us * factor,
        call_base_us=50.0,
        call_overlap_us=50.0 * call_factor,
        channels=24,
        accelerator="h200-sxm",
    )
    return Sample(**(given | other))


def many(n=80) -> list[Sample]:
    return [
        sample(f"k{i % 20}", (1 + i // 20) << 20, 20.0 + 7 * i, 1.1 + 0.05 * (i % 10), waiting_us=math.nan)
        for i in range(n)
    ]


def test_samples_come_back_as_written(tmp_path):
    path = tmp_path / "s.parquet"
    written = [sample(launch=Launch(1, 2, 3, 4, 5)), sample("b", waiting_us=120.0)]
    write_samples(path, written, {"note": "x"})
    found, about = read_samples(path)
    assert repr(found) == repr(written) and about["note"] == "x"  # by their text: NaN differs from itself


def test_medians_go_over_ranks_and_repeats():
    runs = [sample(factor=f, rank=r, repeat=i) for i, (f, r) in enumerate([(1.1, 0), (1.2, 1), (1.9, 0)])]
    (one,) = medians([*runs, sample(overlap_us=math.nan)])
    assert one.overlap_us == pytest.approx(120.0)


@pytest.mark.parametrize("content", [b"", b"no parquet", b"PAR1" + b"\0" * 40])
def test_a_file_that_is_no_table_is_refused(tmp_path, content):
    path = tmp_path / "s.parquet"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="no Parquet file of echo-sim overlap collect"):
        read_samples(path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.bin"  # the name says nothing
    data = training.prepare(many(), H200)
    about = {"accelerator": "h200-sxm", "targets": ["kernel", "call"], "pairs": 80}
    save(path, training.fit(data, rounds=20), about | {"channels": [24, 24], "sizes": [1 << 20, 4 << 20]})
    return path


def test_a_model_is_read_by_its_content_and_saved_again_alike(trained, tmp_path):
    import xgboost

    model = load(trained)
    pairs = [(pointwise(1 << 22, 60.0), ALL_REDUCE), (gemm(512, 512, 512, 9.0), ALL_REDUCE)]
    expected = model.predict(pairs, H200)
    booster = xgboost.Booster()
    booster.load_model(bytearray(trained.read_bytes()))
    text = tmp_path / "model.ubj"  # JSON under a wrong name
    text.write_bytes(bytes(booster.save_raw("json")))
    np.testing.assert_allclose(load(text).predict(pairs, H200), expected, rtol=1e-6)
    assert model.targets == ("kernel", "call")


def refused(tmp_path, content: bytes) -> str:
    path = tmp_path / "model.ubj"
    path.write_bytes(content)
    with pytest.raises(UsageError) as error:
        load(path)
    return str(error.value)


def test_what_is_no_model_is_refused_with_the_reason(trained, tmp_path):
    assert "empty" in refused(tmp_path, b"")
    assert "a pickle, which is never loaded" in refused(tmp_path, pickle.dumps({"a": 1}))
    assert "XGBoost 3.0 or older and save it as UBJ" in refused(tmp_path, b"binf" + b"\0" * 100)
    assert "XGBoost 3.0 or older" in refused(tmp_path, b"\0\0\0\x3f" + b"\0" * 60 + b"gbtree" + b"\0" * 50)
    assert "neither UBJ nor JSON" in refused(tmp_path, b"<html>")
    assert "cannot read this model" in refused(tmp_path, b'{"learner": 1}')
    assert "cannot read this model" in refused(tmp_path, trained.read_bytes()[:500])
    with pytest.raises(UsageError, match="No such file"):
        load(tmp_path / "none.ubj")


def test_models_of_others_and_of_other_features_are_refused(trained, tmp_path):
    import xgboost

    booster = xgboost.Booster()
    booster.load_model(bytearray(trained.read_bytes()))
    about = json.loads(booster.attr("echo_overlap"))
    booster.set_attr(echo_overlap=json.dumps(about | {"features": 0}))
    assert "features of version 0" in refused(tmp_path, bytes(booster.save_raw("ubj")))
    booster.set_attr(echo_overlap=json.dumps(about | {"names": ["x"]}))
    assert "train it again" in refused(tmp_path, bytes(booster.save_raw("ubj")))
    booster.set_attr(echo_overlap="{")
    assert "description is damaged" in refused(tmp_path, bytes(booster.save_raw("ubj")))
    booster.set_attr(echo_overlap=None)
    assert "not of echo-sim overlap train" in refused(tmp_path, bytes(booster.save_raw("ubj")))


# ---- training ----


def test_scores_by_hand():
    s = training.score(np.array([100.0, 109.0, 151.0]), np.array([100.0, 100.0, 100.0]))
    assert (s.count, s.median_error, s.sum_error) == (3, pytest.approx(0.09), pytest.approx(0.2))
    assert s.within_10 == pytest.approx(2 / 3)


def test_hold_outs_share_no_kernel_and_no_size():
    data = training.prepare(many(), H200)
    for name in training.HOLD_OUTS:
        seen = np.zeros(len(data.kernel), int)
        for held, kept, kernels, sizes in training._folds(data, name, 0):
            seen += held
            assert not (held & kept).any() and held.any() and kept.any()
            assert not set(data.kernel[kept]) & set(kernels) and not set(data.size[kept]) & set(sizes)
        assert (seen == 1).all() or name == "kernel and size"


def test_the_formula_stays_where_it_is_as_good():
    def scores(learned, formula):
        return {"kernel": {"learned": training.Score(9, learned, 1, 0), "formula": training.Score(9, formula, 1, 0)}}

    assert training.used_targets({"kernel": scores(0.02, 0.05), "call": scores(0.05, 0.02), "waiting": {}}) == (
        "kernel",
    )


def test_too_few_pairs_are_refused():
    with pytest.raises(UsageError, match="12 pairs are too few"):
        training.fit(training.prepare(many(12), H200))
    with pytest.raises(UsageError, match="no sample of h200-sxm"):
        training.prepare([sample(accelerator="a100-80gb")], H200)


# ---- what the composer gets ----


def test_the_choice_of_a_model(trained):
    assert choose("none", H200) is None and checked("none") == "none" and checked(None) is None
    assert "formula" in choose("formula", H200).note
    assert "h200-sxm.ubj" in choose(None, H200).note
    assert "formula" in choose(None, load_accelerator("a100-80gb")).note
    assert (
        "model.bin" in choose(str(trained), H200).note and "waiting by the formula" in choose(str(trained), H200).note
    )
    with pytest.raises(UsageError, match="No such file"):
        checked("nowhere.ubj")


def test_factors_are_never_below_one_and_copies_to_the_host_are_left_alone():
    copy = Kernel(OpSignature("copy_device_to_host", (), (), 0, 1 << 20, 1 << 20), 30.0)
    nothing = Kernel(OpSignature("aten.add.Tensor"), 0.0)
    kernels = [copy, nothing, pointwise(1 << 25, 51.4), gemm(2048, 2048, 2048, 25.6)]
    factors = choose(None, H200).slowdowns([(k, ALL_REDUCE) for k in kernels])
    assert (factors[:2] == 1.0).all() and (factors >= 1.0).all()
    assert factors.shape == (4, len(TARGETS))


def test_calls_unlike_those_measured_are_left_to_the_formula():
    kernel = gemm(2048, 2048, 2048, 25.6)
    for other in (replace(ALL_REDUCE, channels=4), replace(ALL_REDUCE, bytes=4096), replace(ALL_REDUCE, channels=100)):
        learned, plain = (choose(spec, H200).slowdowns([(kernel, other)]) for spec in (None, "formula"))
        assert (learned == plain).all()
    learned, plain = (choose(spec, H200).slowdowns([(kernel, ALL_REDUCE)]) for spec in (None, "formula"))
    assert (learned != plain).any()


def test_the_shipped_model_knows_what_an_h200_showed():
    """Real pairs of a profiled training step (24 channels, all-reduce of 64 MiB in float32): a product of 8192 x 2048
    by 2048 x 2048 went from 94.4 to 137.6 us, a pointwise kernel from 24.4 to 31.3."""
    call = Call("all_reduce", 64 << 20, 250.0, 24, 2, 2, "ring", "simple")
    found = choose(None, H200).slowdowns([(gemm(8192, 2048, 2048, 94.4), call), (pointwise(1 << 23, 24.4), call)])
    assert found[0, 0] == pytest.approx(1.46, abs=0.12)
    assert found[1, 0] == pytest.approx(1.28, abs=0.15)


class Answers:
    """A booster that says the same of every row: ln of the factors by TARGETS."""

    def __init__(self, *factors: float):
        self.row = np.log(np.asarray(factors, np.float32))

    def inplace_predict(self, rows, validate_features):
        return np.tile(self.row, len(rows))


@pytest.mark.parametrize(
    ("fills", "call_us", "answered", "expected"),
    [
        (True, 60.0, 2.6, 2.0),  # 1.3 kernels of 100 x 1.2 us: one
        (True, 60.0, 3.1, 4.0),  # 1.55: two
        (True, 20.0, 3.6, 3.0),  # 0.6: half of one
        (True, 12.0, 1.5, 5.0),  # 0.15: half, never less
        (True, 150.0, 1.1, 1.1),  # 1.375: one would be faster than the call alone
        (False, 60.0, 2.6, 2.6),  # the call finds SMs at once
    ],
)
def test_a_call_lasts_whole_kernels_or_half_of_one(fills, call_us, answered, expected):
    row = np.zeros((1, len(NAMES)), np.float32)
    row[0, [NAMES.index(name) for name in ("fills", "ln_run_us", "call_ln_us")]] = fills, np.log(100.0), np.log(call_us)
    found = OverlapModel(Answers(1.2, 1.1, answered), {}).predict_rows(row)
    np.testing.assert_allclose(found, [[1.2, 1.1, expected]], rtol=1e-5)


def test_kernels_known_by_name_alone_are_what_the_name_says():
    """Where a script really ran: a product of 223 us beside an all-reduce is slowed as that operation would be."""
    named = Kernel(OpSignature("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN"), 223.0)
    copied = Kernel(OpSignature("Memcpy HtoD (Pinned -> Device)"), 223.0)
    call = Call("all_reduce", 64 << 20, 240.0, 24, 2, 2, "ring", "simple")
    by_name, of_copy = choose(None, H200).slowdowns([(named, call), (copied, call)])
    n = 4466
    by_shape = choose(None, H200).slowdowns([(gemm(n, n, n, 223.0), call)])[0]
    assert by_name == pytest.approx(by_shape, rel=0.1) and by_name[0] > 1.1
    assert (of_copy == 1.0).all()
