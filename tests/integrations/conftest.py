"""Runs a script of these tests as all ranks of a small world."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from echo_launch.main import main

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


class Simulated:
    """One finished run: its report and what its traced ranks printed."""

    def __init__(self, report: dict, directory: Path):
        self.report = report
        self.directory = directory

    def rows(self, rank: int) -> dict[tuple[str, str], tuple[float, int]]:
        """(group, operation) -> calls and bytes in a step of ``rank``; groups of one rank left out."""
        role = next(role for role in self.report["roles"] if rank in role["ranks"])
        return {(r["group"], r["operation"]): (r["calls"], r["bytes"]) for r in role["communication"] if r["size"] > 1}

    def printed(self, word: str) -> dict[int, list[int]]:
        """Lines "WORD rank number ..." of the traced ranks."""
        found = {}
        for log in sorted((self.directory / "logs").glob("*.log")):
            for line in log.read_text().splitlines():
                if line.startswith(word + " "):
                    rank, *numbers = map(int, line.split()[1:])
                    found[rank] = numbers
        return found


@pytest.fixture
def simulate(monkeypatch, tmp_path):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "PET_NNODES", "PET_NPROC_PER_NODE", "PYTHONSAFEPATH"):
        monkeypatch.delenv(name, raising=False)
    paths = [ROOT, ROOT / "launchers", ROOT / "integrations/megatron", ROOT / "integrations/deepspeed"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("echo_launch.world.local_accelerators", list)
    count = 0

    def run(script: str, world_size: int, options: str = "", own: str = "") -> Simulated:
        nonlocal count
        count += 1
        out = tmp_path / f"run{count}"
        arguments = ["--simulate", "--world-size", str(world_size), "--quiet", "--out", str(out), *own.split()]
        assert main([*arguments, str(HERE / "scripts" / script), *options.split()]) == 0
        report = json.loads((out / "report.json").read_text())
        assert report["problems"] == []
        assert sorted(r for role in report["roles"] for r in role["ranks"]) == list(range(world_size))
        assert not [a for a in report["assumptions"] if a["kind"].startswith("op priced")]
        return Simulated(report, out)

    return run
