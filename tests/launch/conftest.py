"""Lets the fork server of a test find the fake tracer, and keeps the developer's own job out of the tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "PET_NNODES", "PET_NPROC_PER_NODE", "PYTHONSAFEPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(ROOT), str(ROOT / "launchers")]))
    monkeypatch.chdir(tmp_path)
    # The tests' world is this machine without its GPUs.
    monkeypatch.setattr("echo_launch.world.local_accelerators", list)
    for path in (str(ROOT), str(ROOT / "launchers")):
        if path not in sys.path:
            monkeypatch.syspath_prepend(path)
