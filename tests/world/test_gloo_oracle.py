"""Virtual ranks against real gloo processes: the same collectives, groups, bytes, dtypes and order."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SIZES = dict(layers=2, hidden=32, heads=2, seq=16, vocab=64, micro_batch=2, steps=2, warmup=1)


def case(name: str, world: int, script: str, *argv: str, layers: int | None = None) -> dict:
    sizes = {**SIZES, **({"layers": layers} if layers else {})}
    tiny = [word for name, n in sizes.items() for word in (f"--{name.replace('_', '-')}", str(n))]
    return dict(name=name, world=world, script=script, argv=[*tiny, *argv], cuda_stand_ins="mcore" in script)


def own(name: str, world: int, script: str, *argv: str) -> dict:
    """A script of the tests (tests/world/scripts) that takes no model sizes."""
    return dict(name=name, world=world, script=script, argv=list(argv), cuda_stand_ins=False)


CASES = [
    own("collectives-2", 2, "collectives.py"),
    own("collectives-4", 4, "collectives.py"),
    *(
        own(f"ddp-{mode}", 2, "ddp_modes.py", "--mode", mode)
        for mode in ("static", "unused", "view", "fp16", "no-sync")
    ),
    case("ddp", 2, "train_ddp.py", "--bucket-mb", "1"),
    case("ddp-accumulation", 2, "train_ddp.py", "--micro-batches", "2"),
    case("fsdp2", 2, "train_fsdp2.py"),
    case("fsdp2-checkpoint", 2, "train_fsdp2.py", "--checkpoint", "--micro-batches", "2"),
    case("fsdp2-tp", 4, "train_fsdp2.py", "--tp", "2"),
    case("fsdp2-zero2", 4, "train_fsdp2.py", "--no-reshard"),
    case("pp-gpipe", 2, "train_pp.py", "--schedule", "gpipe", "--micro-batches", "4"),
    case("pp-1f1b", 4, "train_pp.py", "--schedule", "1f1b", "--micro-batches", "4", layers=4),
    case("pp-interleaved", 2, "train_pp.py", "--schedule", "interleaved", "--micro-batches", "4", layers=4),
    case("mcore-tp2", 2, "train_mcore.py", "--tp", "2"),
    case("mcore-pp2", 2, "train_mcore.py", "--pp", "2", "--micro-batches", "4"),
    case("mcore-dp2", 2, "train_mcore.py"),
    case("mcore-dp2-distributed-optimizer", 2, "train_mcore.py", "--distributed-optimizer", "--overlap"),
    case("mcore-tp2-pp2", 4, "train_mcore.py", "--tp", "2", "--pp", "2", "--micro-batches", "2"),
    case("mcore-pp2-vpp2", 2, "train_mcore.py", "--pp", "2", "--vpp", "2", "--micro-batches", "2", layers=4),
    case("mcore-tp2-sequence-parallel", 2, "mcore_sequence_parallel.py", "--tp", "2"),
    *(case(f"deepspeed-zero{z}", 2, "deepspeed_cpu.py", "--zero", str(z)) for z in (1, 2, 3)),
]
FRAMEWORKS = {"mcore": "megatron", "deepspeed": "deepspeed"}
MISSING = [word for word, package in FRAMEWORKS.items() if importlib.util.find_spec(package) is None]
if TorchVersion(torch.__version__) < "2.13":
    MISSING.append("train_pp")  # its exchange of shapes fails on real gloo
CASES = [c for c in CASES if not any(word in c["script"] for word in MISSING)]
CASES = [c for c in CASES if c["name"] in os.environ.get("ECHO_ORACLE_CASES", c["name"]).split(",")]


def start(out: Path, name: str, cases: list[dict], *arguments: str) -> tuple[subprocess.Popen, Path]:
    listing, log = out / f"{name}.cases", out / f"{name}.log"
    listing.write_text(json.dumps(cases))
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100000", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(HERE / "oracle_run.py"), *arguments, "--cases", str(listing), "--out", str(out)]
    with log.open("w") as stream:
        return subprocess.Popen(command, stdout=stream, stderr=stream, env=environment), log


def finish(started: list[tuple[subprocess.Popen, Path]], timeout: float = 300) -> None:
    try:
        for process, log in started:
            assert process.wait(timeout) == 0, log.read_text()[-4000:]
    finally:
        for process, _ in started:
            process.kill()


def runs(out: Path, runner: str | None = None) -> None:
    """All cases, real and virtual. ``runner``: "module:function" of another virtual side (see oracle_run.py)."""
    (out / "real").mkdir()
    (out / "virtual").mkdir()
    for world in sorted({c["world"] for c in CASES}):
        cases = [c for c in CASES if c["world"] == world]
        finish([start(out / "real", f"w{world}r{r}", cases, "real", "--rank", str(r)) for r in range(world)])
    arguments = ["--runner", runner] if runner else []
    finish([start(out / "virtual", "virtual", CASES, "virtual", *arguments)])


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("oracle")
    runs(out)
    return out


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_virtual_ranks_communicate_as_real_ones_do(results: Path, case: dict):
    for rank in range(case["world"]):
        name = f"{case['name']}.{rank}.json"
        real = json.loads((results / "real" / name).read_text())
        virtual = json.loads((results / "virtual" / name).read_text())
        assert real["collectives"], "the real side communicated nothing"
        for what in ("collectives", "messages"):
            assert sorted(virtual[what]) == sorted(real[what]), f"rank {rank}: groups with {what} differ"
            for group, calls in real[what].items():
                ours = virtual[what][group]
                i = next((i for i, (a, b) in enumerate(zip(ours, calls)) if a != b), min(len(ours), len(calls)))
                assert ours == calls, (
                    f"rank {rank}, group {group}: {what} differ from number {i} of {len(calls)}: "
                    f"virtual {ours[i : i + 3]} of {len(ours)}, real {calls[i : i + 3]}"
                )
