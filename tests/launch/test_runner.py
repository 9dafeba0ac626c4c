"""A script run by Echo cannot tell that it is not run by `python script.py` or `python -m module`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = '''
"""A docstring."""
import json, sys, inspect, pickle
class Thing: pass
print(json.dumps({
    "argv": sys.argv, "path0": sys.path[0], "file": __file__, "name": __name__, "package": __package__, "doc": __doc__,
    "spec": None if __spec__ is None else __spec__.name, "main": sys.modules["__main__"].__dict__ is globals(),
    "filename": inspect.currentframe().f_code.co_filename, "cached": __cached__ is None,
    "pickled": type(pickle.loads(pickle.dumps(Thing()))) is Thing, "annotations": "annotations" in globals(),
}))
'''
RUNNER = (
    "import sys; from echo_hooks.runner import run_script; run_script(sys.argv[1], sys.argv[3:], sys.argv[2] == 'm')"
)


def both(tmp_path: Path, words: list[str], module: bool = False, **environment: str) -> tuple[str, str]:
    """What the probe prints under Python itself, and under Echo's runner."""
    variables = {**os.environ, **environment}
    python = [sys.executable, *(["-m"] if module else []), *words]
    runner = [sys.executable, "-P", "-c", RUNNER, words[0], "m" if module else "s", *words[1:]]
    outputs = []
    for command in (python, runner):
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=variables)
        outputs.append(done.stdout if done.returncode == 0 else f"{done.returncode} {done.stderr.splitlines()[-1]}")
    return outputs[0], outputs[1]


@pytest.mark.parametrize("path", ["probe.py", "sub/probe.py", "sub/../probe.py", "link.py"])
def test_scripts(tmp_path, path):
    (tmp_path / "sub").mkdir()
    for name in ("probe.py", "sub/probe.py"):
        (tmp_path / name).write_text(PROBE)
    (tmp_path / "link.py").symlink_to("sub/probe.py")
    python, echo = both(tmp_path, [path, "--lr", "0.1", "-m"])
    assert json.loads(echo) == json.loads(python)


@pytest.mark.parametrize("name", ["package.probe", "package"])
def test_modules(tmp_path, name):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    for file in ("probe.py", "__main__.py"):
        (tmp_path / "package" / file).write_text(PROBE)
    python, echo = (json.loads(text) for text in both(tmp_path, [name, "--x", "1"], module=True))
    assert echo == python


def test_exit_status_and_errors_pass_through(tmp_path):
    (tmp_path / "leave.py").write_text("import sys; sys.exit(5)")
    (tmp_path / "fail.py").write_text("def f():\n    raise KeyError('k')\nf()\n")
    (tmp_path / "bad.py").write_text("x = (\n")
    (tmp_path / "odd.py").write_bytes(b"# -*- coding: latin-1 -*-\nprint('\xe9' == chr(233))\n")
    for name in ("leave.py", "fail.py", "bad.py", "odd.py"):
        if name == "leave.py":
            command = [sys.executable, "-c", RUNNER, name, "s"]
            assert subprocess.run(command, cwd=tmp_path).returncode == 5
            continue
        python, echo = both(tmp_path, [name])
        assert echo == python


def test_safe_path_is_respected(tmp_path):
    (tmp_path / "probe.py").write_text(PROBE)
    python, echo = (json.loads(text) for text in both(tmp_path, ["probe.py"], PYTHONSAFEPATH="1"))
    assert echo["path0"] == python["path0"] != str(tmp_path)


def test_the_import_path_is_set_once(tmp_path, monkeypatch):
    from echo_hooks.runner import set_import_path

    monkeypatch.setattr(sys, "path", ["/elsewhere"])
    monkeypatch.chdir(tmp_path)
    set_import_path("train.py")
    set_import_path("train.py")
    assert sys.path == [str(tmp_path), "/elsewhere"]
