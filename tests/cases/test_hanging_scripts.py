"""Plans that hang, from the user cases: what Echo says of each script in ``hangs``, and that its smallest fix is clean.

Docstrings as in test_cases; besides, with each ``fixed:`` word as argument the script is clean, and with an ``unsafe:``
one it runs and is flagged.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_cases import expectations, named_lines

from echo_launch.main import main

SCRIPTS = sorted((Path(__file__).parent / "hangs").glob("*.py"))
BROKEN = [script for script in SCRIPTS if "3" in expectations(script)["exit"]]
FIXES = [(s, key, word) for s in SCRIPTS for key in ("fixed", "unsafe") for word in expectations(s).get(key, [])]


LONG = (pytest.mark.slow,)


def is_long(script: Path) -> bool:
    return "deepspeed" in script.read_text() or "3" not in expectations(script)["exit"]


def simulate(script: Path, *words: str) -> int:
    run = expectations(script)["run"][0].split()
    return main(["--simulate", *run, "--quiet", "--out", f"run-{script.stem}-{'-'.join(words)}", str(script), *words])


@pytest.mark.parametrize("script", [pytest.param(s, marks=LONG * is_long(s), id=s.stem) for s in SCRIPTS])
def test_what_is_said_of_a_hang(script, here, capfd):
    expected = expectations(script)
    if "deepspeed" in script.read_text():
        pytest.importorskip("deepspeed")
    status = simulate(script)
    said = "".join(capfd.readouterr())
    assert status == int(expected["exit"][0]), said
    for text in [*expected["says"], *named_lines(script)]:
        assert text in said
    assert "Traceback" not in said and "echo_hooks" not in said


@pytest.mark.slow
@pytest.mark.parametrize("script, kind, word", FIXES, ids=lambda x: getattr(x, "stem", x))
def test_the_smallest_fix(script, kind, word, here, capfd):
    if "deepspeed" in script.read_text():
        pytest.importorskip("deepspeed")
    assert simulate(script, word) == 0, capfd.readouterr()
    report = json.loads(Path(f"run-{script.stem}-{word}/report.json").read_text())
    assert [problem["kind"] for problem in report["problems"]] == ([] if kind == "fixed" else ["unsafe"])
    if kind == "unsafe":
        said = capfd.readouterr().out
        assert "UNSAFE: completes only if sends of up to 4194304 bytes are buffered" in said
        assert all(text in said for text in named_lines(script))


def test_every_broken_script_has_a_fix():
    assert len(BROKEN) == 10 and {script for script, kind, _ in FIXES if kind == "fixed"} == set(BROKEN)
