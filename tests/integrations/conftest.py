"""Simulations of the scripts here, each in a directory of its own, with the sources under test."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from echo_launch.main import main

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@pytest.fixture
def simulate(monkeypatch, tmp_path):
    """``simulate(script, world size, its options, launcher's options)`` gives the report of a run that ended well."""
    sources = [ROOT, ROOT / "launchers", ROOT / "integrations/megatron", ROOT / "integrations/deepspeed"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, sources)))
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "PET_NNODES", "PET_NPROC_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("echo_launch.world.local_accelerators", list)

    def run(script: str | Path, world_size: int, options: list[str] = (), own: list[str] = ()) -> dict:
        out = tmp_path / f"run{len(list(tmp_path.glob('run*')))}"
        words = ["--simulate", "--world-size", str(world_size), "--quiet", "--out", str(out), *own]
        assert main([*words, str(HERE / script), *options]) == 0
        report = json.loads((out / "report.json").read_text())
        assert report["problems"] == []
        assert not [a for a in report["assumptions"] if a["kind"].startswith("op priced")]
        return report

    return run


def communication(report: dict, rank: int = 0) -> dict[tuple[str, str], tuple[float, int]]:
    """(group, operation) -> calls and bytes in a step of ``rank``; groups of one rank left out."""
    role = next(role for role in report["roles"] if rank in role["ranks"])
    return {(r["group"], r["operation"]): (r["calls"], r["bytes"]) for r in role["communication"] if r["size"] > 1}
