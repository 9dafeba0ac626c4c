"""Fits: known multipliers come back, published groups of GPUs are predicted from the others, files survive."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from echo_hooks.errors import UsageError
from echo_hooks.hardware.cluster import cluster_names, load_cluster
from echo_hooks.network.calibration import (
    Calibration,
    Scaling,
    load_calibration,
    shipped_calibration,
    write_calibration,
)
from echo_hooks.network.describe import describe
from echo_hooks.network.durations import PART_NAMES
from echo_hooks.network.fit import MULTIPLIERS, fit
from echo_hooks.network.measured import compare, mean_errors, model_of, predicted_us
from echo_hooks.network.model import CommunicationModel
from echo_hooks.network.nccl_tuning_log import TuningTable
from echo_hooks.network.sweep_files import read_sweeps
from echo_hooks.network.sweeps import Sweep

ECHO = Path(__file__).parent / "data" / "echo"
SWEEP = Path(__file__).parents[2] / "bench" / "results" / "nccl_sweep_h200x2.csv"
ECHO_VERSION = "2.18.3"  # assumed: the logs do not say it
A100 = load_cluster("a100-40gb:2x8")
H100 = load_cluster("h100-sxm:1x8")
SIZES = tuple(1 << k for k in range(10, 33))


def echo_logs():
    logs = {n: read_sweeps(ECHO / f"nccl_{n}.log")[0] for n in (2, 4, 8, 16)}
    return {n: dataclasses.replace(s, points=tuple(p for p in s.points if p[0] >= 2048)) for n, s in logs.items()}


def made_up(collective, ranks, calibration):
    """A sweep that follows ``calibration`` exactly, by its kernel time."""
    sweep = Sweep(collective, ranks, 1, tuple((size, 1.0) for size in SIZES), "bfloat16", "kernel")
    model, members = model_of(sweep, H100, calibration)
    return dataclasses.replace(sweep, points=tuple(zip(SIZES, predicted_us(sweep, model, members).tolist())))


def test_every_part_has_its_multiplier():
    assert [name.removesuffix("_us") for name in MULTIPLIERS] == list(PART_NAMES)


def test_known_multipliers_come_back():
    truth = Scaling(base=0.6, hop=1.5, transfer=1.2, copy=0.4, ramp=0.1)
    world = Calibration("truth", {("node", "ring", p, ""): truth for p in ("ll", "ll128", "simple")})
    sweeps = [made_up(c, n, world) for c in ("all_gather", "reduce_scatter") for n in (2, 3, 4, 8)]
    fitted = fit(sweeps, H100)
    errors = mean_errors(compare(sweeps, H100, fitted.calibration))
    assert errors["all sizes"] < 0.02
    found = fitted.calibration.scalings
    assert found["node", "ring", "simple", ""].transfer == pytest.approx(truth.transfer, rel=0.05)
    assert found["node", "ring", "ll", ""].hop == pytest.approx(truth.hop, rel=0.1)
    assert "transfer" in fitted.calibration.support["node", "ring", "simple", ""].identified


def test_what_the_data_do_not_say_stays_at_its_prior():
    truth = Calibration("truth", {("node", "ring", "simple", ""): Scaling(transfer=1.5)})
    sweep = made_up("all_gather", 8, truth)
    fitted = fit([sweep], H100).calibration
    assert fitted.scalings["node", "ring", "simple", ""].net_hop == 1.0
    assert "net_hop" not in fitted.support["node", "ring", "simple", ""].identified
    assert ("node", "nvls", "simple", "") not in fitted.scalings


def test_kernel_times_of_every_operation_and_protocol_are_predicted_at_sizes_between():
    """Two H200, bench/gpu/nccl_sweep.py; every other size from the rest, and from NCCL's own numbers alone."""
    cluster, sweeps = load_cluster("h200-sxm:1x2"), read_sweeps(SWEEP)
    assert {s.clock for s in sweeps} == {"kernel"}
    some = [dataclasses.replace(s, points=s.points[::2]) for s in sweeps]
    rest = [dataclasses.replace(s, points=s.points[1::2]) for s in sweeps]
    assert mean_errors(compare(rest, cluster, fit(some, cluster).calibration))["all sizes"] < 0.05
    assert mean_errors(compare(sweeps, cluster, Calibration()))["all sizes"] < 0.25


def test_fixed_multipliers_stay_whatever_the_data_say():
    """Two ranks do not tell the links' share of an all-to-all from a rank's own: left free, four ranks would come out
    at half their time."""
    cluster, prior = load_cluster("h200-sxm:1x8"), shipped_calibration("h200-sxm")
    sweeps = [s for s in read_sweeps(SWEEP) if s.collective == "all_to_all"]
    found = fit(sweeps, cluster, prior=prior, fixed=("transfer", "copy")).calibration
    for protocol in ("ll", "simple"):
        key = ("node", "p2p", protocol, "")
        assert (found.scalings[key].transfer, found.scalings[key].copy) == pytest.approx(
            (prior.scalings[key].transfer, prior.scalings[key].copy), rel=1e-6
        )
        assert not {"transfer", "copy"} & set(found.support[key].identified)


def test_the_shipped_all_to_all_of_an_h200_is_that_of_kernels():
    cluster = load_cluster("h200-sxm:1x8")
    sweeps = [s for s in read_sweeps(SWEEP) if s.collective == "all_to_all"]
    errors = mean_errors(compare(sweeps, cluster))
    assert max(errors[name] for name in errors) < 0.08
    # And four ranks keep the links' speed: 3/4 of the bytes go out, at the 370.8 GB/s of NVLink less a tenth.
    us = CommunicationModel(cluster).collective("all_to_all", (0, 1, 2, 3), 1 << 29, "bfloat16").duration_us
    assert 0.85 < 0.75 * (1 << 29) / 370.8e3 / us < 1.0


def test_outliers_do_not_move_a_fit():
    truth = Calibration("truth", {("node", "ring", "simple", ""): Scaling(transfer=1.3)})
    sweep = made_up("all_gather", 4, truth)
    spoilt = tuple((s, t * (20 if i == 18 else 1)) for i, (s, t) in enumerate(sweep.points))
    fitted = fit([dataclasses.replace(sweep, points=spoilt)], H100).calibration
    assert fitted.scalings["node", "ring", "simple", ""].transfer == pytest.approx(1.3, rel=0.1)


def test_too_little_is_refused():
    sweep = dataclasses.replace(echo_logs()[4], points=echo_logs()[4].points[-3:])
    with pytest.raises(
        UsageError, match=r"nccl_4.log, line 10: 3 usable points in 1 sweep of 2 ranks or more; a calibration"
    ):
        fit([sweep], A100, nccl_version=ECHO_VERSION)
    with pytest.raises(UsageError, match="0 usable points"):
        fit(read_sweeps(ECHO / "nccl_1.log"), A100)


def test_mixed_versions_are_refused():
    a, b = echo_logs()[4], dataclasses.replace(echo_logs()[8], nccl_version="2.27.3")
    said = r"nccl_8.log, line 14: 2.27.3, but nccl_4.log, line 10: 2.18.3: different versions"
    with pytest.raises(UsageError, match=said):
        fit([a, b], A100, nccl_version=ECHO_VERSION)


def test_mixed_accelerators_are_refused():
    a, b = (dataclasses.replace(echo_logs()[4], accelerator=name) for name in ("NVIDIA A100", "NVIDIA H100"))
    with pytest.raises(UsageError, match=r"NVIDIA H100, but .*: NVIDIA A100: different accelerators"):
        fit([a, b], A100, nccl_version=ECHO_VERSION)


def test_the_librarys_table_is_kept_and_decides(tmp_path):
    """As import instead of the rules: what ran in the sweep is taken from it, and so is what a prediction runs."""
    said = {("all_reduce", "ring", "simple"): (1.0, 1000.0), ("all_reduce", "ring", "ll"): (100.0, 1.0)}
    table = TuningTable(4, 1, said)
    fitted = fit([echo_logs()[4]], A100, nccl_version=ECHO_VERSION, tables=[table]).calibration
    assert {key[1:3] for key in fitted.support} == {("ring", "simple")}
    path = tmp_path / "cal.toml"
    write_calibration(fitted, path)
    loaded = load_calibration(path)
    assert loaded.tables == (table,)
    assert (
        CommunicationModel(A100, calibration=loaded).collective("all_reduce", (0, 1, 2, 3), 2048, "float32").protocol
        == "simple"
    )


def test_a_sweep_that_the_nodes_cannot_hold_is_refused():
    with pytest.raises(UsageError, match="16 ranks per node"):
        fit([dataclasses.replace(echo_logs()[16], nodes=1)], A100, nccl_version=ECHO_VERSION)


@pytest.mark.parametrize(
    ("held", "all_sizes", "large"),
    [(2, 0.12, 0.07), (4, 0.06, 0.03), (8, 0.06, 0.05)],  # 16, alone between nodes, cannot be told from the others
)
def test_a_group_size_from_the_others(held, all_sizes, large):
    """Published all-reduce logs of A100; the expectation in advance was 12 % over all sizes and 6 % from 1 MiB."""
    logs = echo_logs()
    calibration = fit([s for n, s in logs.items() if n != held], A100, nccl_version=ECHO_VERSION).calibration
    errors = mean_errors(compare([logs[held]], A100, calibration, nccl_version=ECHO_VERSION))
    assert errors["all sizes"] < all_sizes
    assert errors["1 MiB and above"] < large


def test_in_sample_on_the_published_logs():
    logs = list(echo_logs().values())
    errors = mean_errors(compare(logs, A100, nccl_version=ECHO_VERSION))
    assert errors["all sizes"] < 0.045
    assert errors["1 MiB and above"] < 0.03


def test_files_come_back(tmp_path):
    calibration = fit(list(echo_logs().values()), A100, nccl_version=ECHO_VERSION, name='a "name"').calibration
    write_calibration(calibration, tmp_path / "a.toml", "made by\na test")
    again = load_calibration(tmp_path / "a.toml")
    write_calibration(again, tmp_path / "b.toml", "made by\na test")
    assert (tmp_path / "a.toml").read_text() == (tmp_path / "b.toml").read_text()
    assert again.scalings.keys() == calibration.scalings.keys()
    key = ("node", "ring", "ll", "")
    assert again.scalings[key].hop == pytest.approx(calibration.scalings[key].hop, rel=1e-3)
    assert again.support[key].points == calibration.support[key].points


ENTRY = '[[fit]]\nscope = "node"\nalgorithm = "ring"\nprotocol = "ll"\ncollective = ""\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("format = 2", "format"),
        ("format = 1\nfit = 3", "fit"),
        ("format = 1\ncolour = 3", "colour: unknown key"),
        ("format = 1\nname = 3", "name"),
        ("format = 1\n" + ENTRY.replace('"node"', '"rack"'), '"node" or "network"'),
        ("format = 1\n" + ENTRY + "base = -1", "base"),
        ("format = 1\n" + ENTRY + "transfer = 0", "transfer"),
        ("format = 1\n" + ENTRY + "speed = 1", "speed: unknown key"),
        ("format = 1\n" + ENTRY + "points = 3", "missing beside points"),
        ("format = 1\n" + ENTRY + ENTRY, "twice"),
        ("format = ", "not valid TOML"),
    ],
)
def test_wrong_files_say_where(tmp_path, text, said):
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(UsageError, match=said) as error:
        load_calibration(tmp_path / "c.toml")
    assert "c.toml" in str(error.value)


def test_shipped_calibrations_load_and_say_where_they_are_from():
    found = [c for name in cluster_names() if (c := shipped_calibration(name))]
    assert {c.name for c in found} == {"a100-40gb", "a100-80gb", "b200", "h100-sxm", "h200-sxm", "h800"}
    for calibration in found:
        assert "aiconfigurator" in calibration.source or "NetX-lab/Echo" in calibration.source
        assert all(s.points >= 3 and s.band[0] < 1 < s.band[1] for s in calibration.support.values())


def test_bands_are_wide_where_nothing_was_measured():
    def band(spec, ranks, calibration=None):
        said = describe(CommunicationModel(load_cluster(spec), calibration=calibration), "all_reduce", ranks, 1 << 26)
        return said["duration_p90_us"] / said["duration_p10_us"]

    eight, sixteen = tuple(range(8)), tuple(range(16))
    assert (
        band("h100-sxm:2x8", eight) < 1.5 < band("h100-sxm:2x8", sixteen) < band("h100-sxm:2x8", eight, Calibration())
    )


def test_notes_warn_of_another_version_and_of_no_data_between_nodes():
    notes = CommunicationModel(load_cluster("h100-sxm:2x8"), nccl_version="2.22.3").notes
    assert any("measured with NCCL 2.29.2; the job has 2.22.3" in note for note in notes)
    assert any("no measurement between nodes" in note for note in notes)
    assert "not calibrated" in CommunicationModel(load_cluster("mi300x:1x8")).notes[0]


def test_beyond_the_measured_scale_is_said():
    model = CommunicationModel(load_cluster("a100-40gb:8x8"))
    within, beyond = (describe(model, "all_reduce", tuple(range(n)), 1 << 28) for n in (16, 64))
    assert not within["calibration"]["beyond_measured_scale"]
    assert beyond["calibration"]["beyond_measured_scale"]
    widths = [said["duration_p90_us"] / said["duration_p10_us"] for said in (within, beyond)]
    assert widths[1] > widths[0]
