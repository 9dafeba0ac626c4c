"""Each script here with an `exit:` line is a user's that goes wrong; its docstring says how, and what Echo must say.

``run:`` the options, ``exit:`` the status, ``says:`` texts on stderr. Lines marked ``# named`` must be named too.
"""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from echo_launch.main import main

CASES = Path(__file__).parent
EXAMPLES = CASES.parent.parent / "examples"


def expectations(path: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines():
        key, separator, value = line.partition(": ")
        if separator and key in ("run", "exit", "says", "fixed", "unsafe"):
            found.setdefault(key, []).append(value)
    return found


def named_lines(path: Path) -> list[str]:
    """The source lines that must be named, as Echo writes them."""
    lines = path.read_text().splitlines()
    return [f"{path.name}:{number}" for number, line in enumerate(lines, 1) if line.endswith("# named")]


SCRIPTS = sorted(path for path in CASES.glob("*.py") if "exit" in expectations(path))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_case(script, here, capfd):
    expected = expectations(script)
    status = main(["--simulate", *expected["run"][0].split(), "--quiet", str(script)])
    out, err = capfd.readouterr()
    assert status == int(expected["exit"][0]), err
    said = out + err
    for text in [*expected["says"], *named_lines(script)]:
        assert text in said
    if "Traceback" not in "".join(expected["says"]):
        assert "Traceback" not in said
    assert "echo_hooks" not in said  # no frame of Echo's own


def test_every_kind_of_failure_has_a_case():
    assert {path.stem for path in SCRIPTS} >= {
        "mismatch_bare", "mismatch_in_loop", "raises_on_rank_5", "no_optimizer", "unanswered_flag",
        "one_rank_never_trains", "skips_a_collective", "unpaired_send", "fails_after_mismatch",
    }  # fmt: skip


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--cluster", "h900:1x8"], "h900"),
        (["--cluster", "h100-sxm:0x8"], "h100-sxm:0x8"),
        (["--cluster", "missing.toml"], "missing.toml"),
        (["--steps", "0"], "--steps"),
        (["--warmup-steps", "-1"], "--warmup-steps"),
        (["--world-size", "0"], "world"),
        (["--trace-ranks", "9"], "9"),
    ],
)
def test_bad_arguments_are_one_sentence(words, sentence, here, capfd):
    assert main(["--simulate", "--world-size", "8", *words, str(CASES / "ddp_loop.py")]) == 2
    err = capfd.readouterr().err
    assert sentence in err and err.startswith("echo-launch: ") and err.count("\n") == 1


def test_a_missing_script(here, capfd):
    assert main(["--simulate", "--world-size", "2", "nowhere.py"]) == 2
    err = capfd.readouterr().err
    assert "nowhere.py" in err and err.count("\n") == 1


def test_megatron_refuses_a_layout_in_its_own_words(here, capfd):
    pytest.importorskip("megatron.core")
    words = [
        "--layers",
        "12",
        "--hidden",
        "1792",
        "--heads",
        "14",
        "--seq",
        "128",
        "--vocab",
        "512",
        "--tp",
        "7",
        "--pp",
        "12",
    ]
    assert main(["--simulate", "--world-size", "96", "--quiet", str(EXAMPLES / "train_mcore.py"), *words]) == 1
    err = capfd.readouterr().err
    assert "world_size (96) is not divisible by" in err
    line = next(line for line in err.splitlines() if line.startswith("layout: "))
    assert "world 96 is no multiple of TP 7 x PP 12 x CP 1 = 84; nearest legal: TP 8 (96 = TP 8 x PP 12" in line
    assert err.index(line) < err.index("Traceback")
    assert "echo-launch: rank 0: RuntimeError:" in err and "Traceback" in err


# ---- interrupted ----


def until(condition, seconds: float = 60.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="relies on prctl")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_trace_leaves_nothing(number, here):
    ready, run = here / f"ready-{number}", here / f"run-{number}"
    words = ["--simulate", "--world-size", "2", "--out", str(run), str(CASES / "sleeps.py"), str(ready)]
    command = [sys.executable, "-c", "import sys; from echo_launch.main import main; sys.exit(main())", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    tree: list[psutil.Process] = []
    try:
        until(ready.exists)
        tree = psutil.Process(process.pid).children(recursive=True)
        assert len(tree) >= 2  # the server and the rank
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode == (130 if number == signal.SIGINT else -number)
        until(lambda: not [p for p in tree if p.is_running() and p.status() != psutil.STATUS_ZOMBIE])
        assert not (run / "manifest.json").exists()
        assert not [name for _, _, files in os.walk(run) for name in files if name.endswith(".parquet")]
    finally:
        for each in [*tree, process]:
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                each.kill()
        process.wait()
