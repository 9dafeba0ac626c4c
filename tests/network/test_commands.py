"""echo-sim calibrate and network on the command line: logs of NetX-lab/Echo, and everything that is no log."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from echo_hooks.network.calibration import load_calibration
from echo_launch.sim import main

ECHO = Path(__file__).parent / "data" / "echo"
LOGS = [str(ECHO / f"nccl_{n}.log") for n in (2, 4, 8, 16)]
A100 = ["--cluster", "a100-40gb:2x8"]
VERSION = ["--nccl-version", "2.18.3"]


@pytest.fixture
def calibrated(tmp_path, capsys):
    path = tmp_path / "ours.toml"
    assert main(["calibrate", *LOGS, "-o", str(path), *A100, *VERSION, "--prior", "stock"]) == 0
    return path, capsys.readouterr().out


def ask(capsys, *words):
    assert main(["network", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_calibrate_says_what_it_fitted_and_what_it_left(calibrated):
    path, said = calibrated
    assert said.startswith(f"{path}: 71 points of 4 sweeps, NCCL 2.18.3, on a100-40gb:2x8\n")
    assert "ring simple between nodes: 8 points" in said
    assert "at the prior: " in said
    assert "left out: 38 points whose time is that of the host's launches" in said
    assert load_calibration(path).support["node", "ring", "simple", ""].points == 25


def test_compare_prints_every_point_and_the_errors_by_size(calibrated, capsys, tmp_path):
    path, _ = calibrated
    page = tmp_path / "page.html"
    words = ["network", *A100, "--calibration", str(path), "--compare", LOGS[2], "--plot", str(page)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "1.00 GiB   8.14 ms" in out
    assert "all_reduce on 8 ranks in 1 node" in out
    assert '"type":"log"' in page.read_text().replace(" ", "")
    answer = ask(capsys, *words[1:])
    assert len(answer["points"]) == 28
    worst = max(abs(point["error"]) for point in answer["points"])
    assert answer["mean_errors"]["all sizes"] < 0.05 < worst < 0.2


def test_a_prediction_follows_its_calibration_and_says_whose_it_is(calibrated, tmp_path, capsys):
    """User case 102: two files for one cluster, of two versions; mind when the job's version is another."""
    path, _ = calibrated
    slow = tmp_path / "slow.toml"
    text = path.read_text().replace('nccl_version = "2.18.3"', 'nccl_version = "2.27.1"')
    slow.write_text(re.sub("(?m)^transfer = (.*)$", lambda found: f"transfer = {3 * float(found[1])}", text))
    what = [*A100, "--collective", "all_reduce", "--ranks", "0-15", "--bytes", "1GiB", *VERSION]
    ours, theirs = (ask(capsys, *what, "--calibration", str(p)) for p in (path, slow))
    assert theirs["duration_us"] > 2.5 * ours["duration_us"]
    assert (ours["nccl_version"], ours["algorithm"], ours["calibration"]["name"]) == ("2.18.3", "ring", "ours")
    assert not any("measured with" in note for note in ours["notes"])
    assert any("was measured with NCCL 2.27.1; the job has 2.18.3" in note for note in theirs["notes"])


def test_beyond_the_measured_nodes_a_prediction_says_so(calibrated, capsys):
    """User case 103: two nodes are a special case of tree; eight are not what was measured."""
    path, _ = calibrated
    eight = ["--cluster", "a100-40gb:8x8", "--calibration", str(path), "--collective", "all_reduce", "--bytes", "4KiB"]
    near, far = (ask(capsys, *eight, "--ranks", ranks) for ranks in ("0-15", "0-63"))
    assert [a["calibration"]["beyond_measured_scale"] for a in (near, far)] == [False, True]
    narrow, wide = (a["duration_p90_us"] / a["duration_p10_us"] for a in (near, far))
    assert wide > narrow
    # Up and down three levels of nodes instead of one.
    assert far["duration_us"] - near["duration_us"] == pytest.approx(2 * 2 * 1.93 * 5.0, rel=0.1)


def test_uncalibrated_numbers_have_a_wide_band(calibrated, tmp_path, capsys):
    """User case 109: without a calibration the band is wide, with one it is narrow and holds for sizes held out."""
    path, _ = calibrated
    stock = tmp_path / "stock.toml"
    stock.write_text("format = 1\nname = 'stock'\naccelerator = ''\nnccl_version = ''\nsource = 'none'\n")
    what = [*A100, *VERSION, "--collective", "all_reduce", "--ranks", "0-7", "--bytes", "96MiB"]
    wide, narrow = (ask(capsys, *what, "--calibration", str(p)) for p in (stock, path))
    assert any("not calibrated" in note for note in wide["notes"])
    assert wide["duration_p90_us"] / wide["duration_p10_us"] > 2
    assert narrow["duration_p90_us"] / narrow["duration_p10_us"] < 1.3
    # Between the 64 MiB and 128 MiB of the log: 566 and 1116 us.
    assert narrow["duration_p10_us"] < (566 + 1116) / 2 < narrow["duration_p90_us"]


def test_the_shells_nccl_variables_are_the_jobs(monkeypatch, capsys):
    what = [*A100, "--collective", "all_reduce", "--ranks", "0-7", "--bytes", "1GiB"]
    assert ask(capsys, *what)["protocol"] == "simple"
    monkeypatch.setenv("NCCL_PROTO", "LL")
    assert ask(capsys, *what)["protocol"] == "ll"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["calibrate", "EMPTY", *A100], "empty.log: empty"),
        (["calibrate", "BAD", *A100], "bad.log: no table of nccl-tests in its 2 lines"),
        (["calibrate", "CUT", *A100], "cut.log, line 14: the first of 1 rows, none of which holds"),
        (["calibrate", "CSV", *A100], "rows.csv, line 2: the first of 2 rows, none of which names"),
        (["calibrate", LOGS[1], *A100, "--collective", "all_gather"], "nccl_4.log, line 10: bus bandwidth is 1.5 of"),
        (["calibrate", LOGS[1], "MIXED", *A100], "mixed.log, line 12: 2.27.3, but nccl_4.log, line 10: unknown"),
        (["calibrate", str(ECHO / "nccl_1.log"), *A100], "nccl_1.log, line 7: 0 usable points in 1 sweep of 2 ranks"),
        (["calibrate", "nowhere.log", *A100], "nowhere.log: No such file"),
        (["calibrate", LOGS[3], "--cluster", "a100-40gb:1x4"], "nccl_16.log, line 22: 8 ranks per node; the nodes of"),
        (["calibrate", LOGS[1], *A100, "--ranks", "x"], "--ranks x: how many"),
        (["calibrate", LOGS[1], *A100, "--prior", "none.toml"], "none.toml: No such file"),
        (["network", *A100], "--collective and --ranks and --bytes missing"),
        (["network", *A100, "--plot", "x.html", "--collective", "send", "--ranks", "0,1", "--bytes", "1"], "--compare"),
        (["network", *A100, "--compare", str(ECHO / "nccl_1.log")], "nccl_1.log, line 7: of one rank"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_one_sentence_with_its_line(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    log = Path(LOGS[1]).read_text()
    Path("empty.log").write_text("")
    Path("bad.log").write_text("hello\nworld\n")
    Path("cut.log").write_text("\n".join(["#"] * 2 + log.splitlines()[:11] + ["     8      2   flo"]) + "\n")
    Path("rows.csv").write_text("collective,ranks,bytes,time_us\nsomething,2,8,1\nall_reduce,2,8,nan\n")
    Path("mixed.log").write_text("NCCL version 2.27.3+cuda12.9\n#\n" + log)
    files = {"EMPTY": "empty.log", "BAD": "bad.log", "CUT": "cut.log", "CSV": "rows.csv", "MIXED": "mixed.log"}
    words = [files.get(word, word) for word in words]
    assert main([*words, *(["-o", "c.toml"] if words[0] == "calibrate" else [])]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not Path("c.toml").exists()
