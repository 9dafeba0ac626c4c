"""echo-sim: what it prints, how it exits, and that no bad input ends in a traceback."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from echo_hooks.report.report import build_report
from echo_launch.sim import main

variations: list[dict] = []


@pytest.fixture
def analysed(monkeypatch, composition):
    """`analyse` answers with the hand-built composition; the clusters it was asked for."""
    asked = []
    variations.clear()

    def analyse(run, cluster, *, folded=True, **options):
        asked.append((cluster.name, folded))
        variations.append(options)
        return SimpleNamespace(composition=composition, report=build_report(run, composition, cluster, timings={}))

    module = ModuleType("echo_hooks.analysis")
    module.analyse = analyse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "echo_hooks.analysis", module)
    return asked


def fails(capsys, *words) -> str:
    """The one sentence with which a command fails."""
    assert main([str(word) for word in words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("echo-sim: ") and err.count("\n") == 1
    return err


def test_report(saved, capsys):
    assert main(["report", str(saved)]) == 3  # stage 1 does not fit
    assert capsys.readouterr().out.startswith("OUT_OF_MEMORY: stage 1")
    assert main(["report", str(saved), "--json"]) == 3
    assert capsys.readouterr().out == (saved / "report.json").read_text()


def test_report_of_a_run_that_was_not_composed_yet(run_directory, analysed, capsys):
    assert "names no cluster" in fails(capsys, "report", run_directory)
    manifest = json.loads((run_directory / "manifest.json").read_text())
    (run_directory / "manifest.json").write_text(json.dumps(manifest | {"cluster": "h800:1x8"}))
    assert main(["report", str(run_directory)]) == 0
    assert analysed == [("h800:1x8", True)]


def test_trace(saved, capsys, tmp_path):
    assert main(["trace", str(saved), "-o", str(tmp_path / "t.json")]) == 0
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert main(["trace", str(saved), "-o", str(tmp_path / "t.json.gz")]) == 0
    assert (tmp_path / "t.json.gz").read_bytes() == (saved / "timeline.perfetto.json.gz").read_bytes()


def test_trace_for_another_cluster(saved, analysed, tmp_path):
    assert main(["trace", str(saved), "-o", str(tmp_path / "t.json.gz"), "--cluster", "h200-sxm:1x8"]) == 0
    assert analysed == [("h200-sxm:1x8", True)]
    assert b"all_reduce dp" in gzip.decompress((tmp_path / "t.json.gz").read_bytes())


def test_memory(saved, capsys):
    assert main(["memory", str(saved), "--role", "1"]) == 0
    out = capsys.readouterr().out
    assert "stage 1 (rank 1, traced 1)" in out and "stage 0" not in out
    assert [t.split() for t in out.splitlines() if t.startswith("activations")] == [
        ["activations"] + ["20.0", "MiB"] * 2
    ]
    assert "no such role or rank" in fails(capsys, "memory", saved, "--role", "7")


def test_compose_for_one_cluster(saved, analysed, capsys, tmp_path):
    assert main(["compose", str(saved), "--cluster", "h800:1x8", "--json", "-o", str(tmp_path / "new")]) == 0
    assert json.loads(capsys.readouterr().out)["cluster"]["name"] == "h800:1x8"
    assert (tmp_path / "new" / "report.json").exists()
    assert main(["compose", str(saved), "--cluster", "h800:1x8", "--unfolded"]) == 0
    assert analysed[-1] == ("h800:1x8", False)


def test_compose_for_several_clusters(saved, analysed, capsys):
    words = ["compose", str(saved), "--cluster", "h800:1x8", "--cluster", "a100-80gb:2x4"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == ["h800:1x8", "460", "us"]
    assert lines[2].split()[:3] == ["a100-80gb:2x4", "460", "us"]
    assert main([*words, "--json"]) == 0
    assert [r["cluster"]["name"] for r in json.loads(capsys.readouterr().out)] == ["h800:1x8", "a100-80gb:2x4"]


def test_compose_with_slow_nodes_and_noise(saved, analysed, capsys):
    words = ["--jitter", "5%", "--slow-node", "0=1.1", "--slow-rank", "1=2", "--seed", "3"]
    assert main(["compose", str(saved), "--cluster", "h800:1x8", *words]) == 0
    capsys.readouterr()
    assert variations == [
        {
            "slow_ranks": {0: 1.1, 1: 2.2},
            "jitter": 0.05,
            "seed": 3,
            "host_speed": None,
            "calibration": None,
            "timing": "auto",
            "profiles": (),
            "overlap": None,
        }
    ]
    for wrong, sentence in (
        (["--jitter", "wide"], "--jitter wide"),
        (["--jitter", "nan"], "--jitter nan"),
        (["--slow-node", "1=1.1"], "outside 0 to 0"),
        (["--slow-node", "0"], "NUMBER=FACTOR"),
        (["--slow-rank", "x=2"], "'x' is no rank"),
        (["--slow-rank", "0=-1"], "factor above 0"),
        (["--seed", "-1"], "--seed -1"),
    ):
        assert sentence in fails(capsys, "compose", saved, "--cluster", "h800:1x8", *wrong)


def test_compose_refuses(saved, analysed, capsys, tmp_path):
    assert "unknown cluster preset" in fails(capsys, "compose", saved, "--cluster", "h8000:1x8")
    assert "has 1 accelerators, the run has 2 ranks" in fails(capsys, "compose", saved, "--cluster", "h800:1x1")
    two = ["--cluster", "h800:1x8", "--cluster", "h800:2x8"]
    assert "one directory" in fails(capsys, "compose", saved, *two, "-o", tmp_path / "x")


def test_compare(saved, capsys, tmp_path):
    measured = tmp_path / "measured.json"
    parts = {"compute": 0.3, "exposed_communication": {"dp": 0.1}, "host": 0.02}
    measured.write_text(json.dumps({"step_time_ms": 0.4, "breakdown": parts, "peak_reserved_bytes": 100 << 20}))
    assert main(["compare", str(saved), str(measured)]) == 0
    lines = {t.split("  ")[0]: t.split() for t in capsys.readouterr().out.splitlines()}
    assert lines["step time"][-5:] == ["0.46", "0.40", "+0.06", "+15.0", "%"]
    assert lines["compute"][-5:] == ["0.35", "0.30", "+0.05", "+16.7", "%"]
    assert lines["exposed communication"][-5:] == ["0.09", "0.10", "-0.01", "-10.0", "%"]
    assert lines["bubble"][-4:] == ["0.00", "-", "-", "-"]
    assert lines["peak reserved"][-5:] == ["0.14", "0.10", "+0.04", "+40.0", "%"]


def test_compare_with_the_step_alone(saved, capsys, tmp_path):
    measured = tmp_path / "measured.json"
    measured.write_text('{"step_ms": 0.5, "ranks": [{"rank": 0}]}')
    assert main(["compare", str(saved), str(measured)]) == 0
    assert "states the step alone" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not valid JSON"),
        ("[1]", "a JSON object was expected"),
        ("{}", "step_time_ms is None"),
        ('{"step_time_ms": NaN}', "step_time_ms is nan"),
        ('{"step_time_ms": -1}', "step_time_ms is -1"),
        ('{"step_time_ms": 1, "breakdown": [1]}', "breakdown should be"),
        ('{"step_time_ms": 1, "breakdown": {"exposed_communication": {"dp": "x"}}}', "breakdown should be"),
        ('{"traceEvents": []}', "no kernel in it"),
    ],
)
def test_compare_refuses(saved, capsys, tmp_path, text, says):
    (tmp_path / "measured.json").write_text(text)
    assert says in fails(capsys, "compare", saved, tmp_path / "measured.json")


def test_hardware(capsys):
    assert main(["hardware", "list"]) == 0
    assert "h100-sxm" in capsys.readouterr().out
    assert main(["hardware", "show", "h100-sxm"]) == 0
    out = capsys.readouterr().out
    assert "peak_flops.bfloat16 = 9.89" in out and "NVIDIA H100 datasheet" in out
    assert main(["hardware", "show", "h800:2x8"]) == 0
    assert "world_size = 16" in capsys.readouterr().out


def test_hardware_check(capsys, tmp_path):
    good, bad = tmp_path / "mine.toml", tmp_path / "bad.toml"
    good.write_text('format = 1\npreset = "h100-sxm:4x8"\n')
    assert main(["hardware", "check", str(good)]) == 0
    assert "a valid cluster file" in capsys.readouterr().out
    bad.write_text('format = 1\npreset = "h100-sxm:4x8"\nnodse = 3\n')
    assert "nodse" in fails(capsys, "hardware", "check", bad)
    bad.write_bytes(b"\xff\x00")
    fails(capsys, "hardware", "check", bad)
    fails(capsys, "hardware", "check", tmp_path / "none.toml")
    fails(capsys, "hardware", "check", tmp_path)


def test_network(capsys, monkeypatch):
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if not k.startswith("NCCL_")})
    words = ["network", "--cluster", "h800:2x8", "--collective", "all_reduce", "--ranks", "0-15", "--bytes", "64MiB"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["bytes"], answer["ranks"], answer["placement"]["nodes"]) == (64 << 20, list(range(16)), 2)
    assert answer["bus_bandwidth_gb_per_s"] == pytest.approx(answer["bytes"] / answer["duration_us"] / 1e3 * 1.875)
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "all_reduce of 64.0 MiB (bfloat16), 16 ranks on\n2 nodes of h800:2x8" in out and "busbw" in out


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--ranks", "0-16", "has ranks 0 to 15"),
        ("--ranks", "0-", "is no rank"),
        ("--ranks", "3-1", "is no rank"),
        ("--ranks", "0-3,2", "names a rank twice"),
        ("--ranks", "0-15:0", "is no rank"),
        ("--bytes", "12", "unit"),
        ("--collective", "all_reduze", "all_reduce"),
        ("--cluster", "h800", "PRESET:NODESxGPUS"),
    ],
)
def test_network_refuses(capsys, option, value, says):
    words = {"--cluster": "h800:2x8", "--collective": "all_reduce", "--ranks": "0-15", "--bytes": "1MiB", option: value}
    assert says in fails(capsys, "network", *(word for pair in words.items() for word in pair))


@pytest.mark.parametrize("name", ["sweep"])
def test_what_is_not_built_says_so(capsys, name):
    assert f"{name} is not built yet" in fails(capsys, name, "--any", "option")


@pytest.mark.parametrize("words", [[], ["nonsense"], ["report"], ["compose", "x"]])
def test_bad_arguments_exit_with_2(capsys, words):
    with pytest.raises(SystemExit) as exit:
        main(words)
    assert exit.value.code == 2


@pytest.mark.parametrize(
    "file",
    ["manifest.json", "roles.json", "groups.parquet", "report.json", "ranks/00000.parquet", "ranks/00001.ops.parquet"],
)
@pytest.mark.parametrize("damage", ["truncated", "empty", "wrong kind", "missing"])
def test_a_damaged_run_ends_in_one_sentence(saved, analysed, capsys, file, damage):
    path = saved / file
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"truncated": data[: len(data) // 2], "empty": b"", "wrong kind": b"\x1f\x8b\x00PAR1"}[damage])
    if file == "report.json":
        if damage == "missing":
            return
        assert file in fails(capsys, "report", saved)
    else:
        sentence = fails(capsys, "compose", saved, "--cluster", "h800:1x8")
        assert str(path) in sentence or "manifest.json" in sentence


def test_not_a_run(capsys, tmp_path):
    assert "no manifest.json" in fails(capsys, "memory", tmp_path)
    assert "no such run directory" in fails(capsys, "memory", tmp_path / "none")


def test_outputs_that_cannot_be_written(saved, analysed, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    fails(capsys, "trace", saved, "-o", tmp_path / "file" / "t.json")
    fails(capsys, "compose", saved, "--cluster", "h800:1x8", "-o", tmp_path / "file")
    (tmp_path / "directory.json").mkdir()
    fails(capsys, "trace", saved, "-o", tmp_path / "directory.json")


def test_a_damaged_saved_trace(saved, capsys, tmp_path):
    path = saved / "timeline.perfetto.json.gz"
    path.write_bytes(path.read_bytes()[:100])
    assert "damaged" in fails(capsys, "trace", saved, "-o", tmp_path / "t.json")


def test_a_reader_that_goes_away_and_an_ascii_terminal(saved):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "ascii"}
    command = f"'{sys.executable}' -m echo_launch.sim report '{saved}' | head -n 1"
    done = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stderr == "" and done.stdout.startswith("OUT_OF_MEMORY")
