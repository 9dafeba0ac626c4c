"""The example scripts, unmodified, at small sizes: they run, and communicate what their parallel plan says.

One run of each script is in every suite; the matrix of options and world sizes is slow.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from echo_launch.main import main

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"

LAYERS, HIDDEN, SEQ, VOCAB, BATCH = 8, 64, 32, 128, 2
SIZES = f"--layers {LAYERS} --hidden {HIDDEN} --heads 4 --seq {SEQ} --vocab {VOCAB} --micro-batch {BATCH}"
BLOCK = 12 * HIDDEN**2 + 4 * HIDDEN  # gpt.py: attention, MLP, two layer norms
PARAMETERS = LAYERS * BLOCK + (2 * VOCAB + SEQ) * HIDDEN + 2 * HIDDEN
BF16, FP32 = 2, 4


@pytest.fixture(autouse=True)
def sources(clean_environment, monkeypatch):
    paths = [ROOT, ROOT / "launchers", ROOT / "integrations/megatron", ROOT / "integrations/deepspeed"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))


def simulate(script: str, world_size: int, options: str = "", own: str = "--out run") -> dict:
    """The report of a run that ended well, after looking at what must hold of every report."""
    arguments = ["--simulate", "--world-size", str(world_size), "--quiet", *own.split()]
    status = main([*arguments, str(EXAMPLES / script), *SIZES.split(), *options.split()])
    assert status == 0
    report = json.loads(Path(own.split()[-1], "report.json").read_text())
    sane(report, world_size)
    return report


def sane(report: dict, world_size: int) -> None:
    assert report["problems"] == []
    assert report["step_time_ms"] > 0 and math.isfinite(report["step_time_ms"])
    ranks = sorted(rank for role in report["roles"] for rank in role["ranks"])
    assert ranks == list(range(world_size))
    for role in report["roles"]:
        parts = role["breakdown"]
        shares = [
            *parts["exposed_communication"].values(),
            *(parts[k] for k in ("compute", "bubble", "waiting", "host")),
        ]
        assert all(share >= 0 for share in shares) and parts["compute"] > 0
        assert math.isclose(sum(shares), role["step_time_ms"], rel_tol=1e-6)
        assert role["fits"] and role["peak_allocated_bytes"] > 0
        assert sum(role["held_at_peak"].values()) <= role["peak_allocated_bytes"]
        for row in role["communication"]:
            assert row["time_ms"] > 0 and row["bytes"] >= 0 and row["waiting_ms"] >= 0
    assert not [a for a in report["assumptions"] if a["kind"].startswith("op priced")]


def rows(report: dict, rank: int = 0) -> dict[tuple[str, str], tuple[float, int]]:
    """(group, operation) -> calls and bytes in a step of ``rank``; groups of one rank left out."""
    role = next(role for role in report["roles"] if rank in role["ranks"])
    return {(r["group"], r["operation"]): (r["calls"], r["bytes"]) for r in role["communication"] if r["size"] > 1}


def tokens(report: dict) -> float:
    return report["tokens_per_second"] * report["step_time_ms"] / 1e3


# ---- one of each ----


def test_ddp():
    report = simulate("train_ddp.py", 8, "--micro-batches 2 --bucket-mb 1")
    talk = rows(report)
    assert set(talk) == {("world", "all_reduce")}  # no broadcast: the rebuild of the buckets is no part of a step
    calls, size = talk["world", "all_reduce"]
    assert size == FP32 * PARAMETERS and calls > 1  # in the last micro-batch only
    assert math.isclose(tokens(report), 8 * 2 * BATCH * SEQ, rel_tol=1e-9)
    assert [role["ranks"] for role in report["roles"]] == [list(range(8))]


def test_fsdp2():
    report = simulate("train_fsdp2.py", 4, "--checkpoint")
    name = "world" if ("world", "all_gather") in rows(report) else "dp"  # 2.9 makes a group for a mesh of all
    assert rows(report) == {
        (name, "all_gather"): (2 * (LAYERS + 1), 2 * BF16 * PARAMETERS),
        (name, "reduce_scatter"): (LAYERS + 1, FP32 * PARAMETERS),
    }
    assert math.isclose(tokens(report), 4 * BATCH * SEQ, rel_tol=1e-9)
    assert len(report["roles"]) == 1


def test_pipelining():
    report = simulate("train_pp.py", 4, "--schedule 1f1b --micro-batches 4")
    activation = BATCH * SEQ * HIDDEN * FP32
    for rank, neighbours in ((0, 1), (1, 2), (2, 2), (3, 1)):
        each = (4 * neighbours, 4 * neighbours * activation)
        assert rows(report, rank) == {("world", "send"): each, ("world", "recv"): each}
    peaks = [next(r for r in report["roles"] if rank in r["ranks"])["peak_allocated_bytes"] for rank in (1, 2)]
    assert peaks[0] > peaks[1]  # an earlier stage keeps more micro-batches


def test_megatron():
    report = simulate("train_mcore.py", 8, "--tp 2 --pp 2 --micro-batches 4 --sequence-parallel")
    first, last = rows(report, 0), rows(report, 7)
    stage = LAYERS // 2
    activation = SEQ // 2 * BATCH * HIDDEN * BF16  # a sequence-parallel shard
    for talk in (first, last):
        assert talk["pp", "send"] == talk["pp", "recv"] == (4, 4 * activation)
        assert talk["mp", "all_reduce"] == (1, FP32)  # the gradients' norm
    norms = 4 * HIDDEN
    blocks = stage * (12 * HIDDEN**2 // 2 + norms)
    # Megatron keeps position embeddings whole on each tensor-parallel rank, and cuts the vocabulary.
    assert first["dp-cp", "all_reduce"] == (1, FP32 * (blocks + (VOCAB // 2 + SEQ) * HIDDEN))
    assert last["dp-cp", "all_reduce"] == (1, FP32 * (blocks + VOCAB // 2 * HIDDEN + 2 * HIDDEN))
    assert math.isclose(tokens(report), 2 * 4 * BATCH * SEQ, rel_tol=1e-9)


def test_deepspeed():
    report = simulate("train_deepspeed.py", 2, "--zero 1 --micro-batches 2")
    talk = rows(report)
    gathered = [size for (_, operation), (_, size) in talk.items() if operation == "all_gather"]
    reduced = [size for (_, operation), (_, size) in talk.items() if operation == "all_reduce"]
    assert gathered == [BF16 * PARAMETERS]
    assert len(reduced) == 1 and 0 <= reduced[0] - BF16 * PARAMETERS < 16  # and flags of overflow and the norm
    assert math.isclose(tokens(report), 2 * 2 * BATCH * SEQ, rel_tol=1e-9)


def test_context_parallelism_without_transformer_engine(capfd):
    status = main(
        ["--simulate", "--world-size", "2", "--quiet", str(EXAMPLES / "train_mcore.py"), *SIZES.split(), "--cp", "2"]
    )
    assert status == 1
    assert "Context parallelism is only supported by TEDotProductAttention" in capfd.readouterr().err


# ---- the matrix ----

MATRIX = {
    "train_ddp.py": ["", "--micro-batches 3 --bucket-mb 1", "--kineto {tmp}/trace --result {tmp}/result.json"],
    "train_fsdp2.py": ["", "--no-reshard --micro-batches 2", "--checkpoint"],
    "train_pp.py": [
        f"--schedule {schedule} --micro-batches 8"
        for schedule in ("gpipe", "1f1b", "interleaved --layers 16 --chunks 2")
    ],
    "train_mcore.py": [
        "",
        "--distributed-optimizer --overlap --micro-batches 2",
        "--recompute --overlap",
        "--experts 4",
    ],
    "train_deepspeed.py": [f"--zero {stage} --micro-batches 2" for stage in range(4)],
}
FOR_TWO = {
    "train_fsdp2.py": ["--tp 2"],
    "train_mcore.py": [
        "--tp 2 --sequence-parallel",
        "--pp 2 --micro-batches 4",
        "--pp 2 --vpp 2 --micro-batches 4",
        "--ep 2 --experts 4",
    ],
}
FOR_EIGHT = {
    "train_fsdp2.py": ["--tp 4 --checkpoint --no-reshard"],
    "train_mcore.py": [
        "--tp 2 --pp 2 --micro-batches 4 --sequence-parallel --distributed-optimizer --overlap --recompute",
        "--tp 2 --ep 2 --experts 8 --sequence-parallel --distributed-optimizer",
        "--tp 2 --pp 2 --vpp 2 --micro-batches 4 --distributed-optimizer --overlap",
    ],
}
RUNS = [
    (world, script, options)
    for table, worlds in ((MATRIX, (1, 2, 8)), (FOR_TWO, (2, 8)), (FOR_EIGHT, (8,)))
    for script, lines in table.items()
    for options in lines
    for world in worlds
]


@pytest.mark.slow
@pytest.mark.parametrize("world, script, options", RUNS)
def test_matrix(world, script, options, tmp_path):
    simulate(script, world, options.format(tmp=tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, options",
    [
        ("train_ddp.py", ""),
        ("train_fsdp2.py", ""),
        ("train_deepspeed.py", "--zero 3"),
        ("train_mcore.py", "--distributed-optimizer --overlap"),
    ],
)
def test_the_second_step_is_like_the_third(script, options):
    """What frameworks do once, in their second step, is left out of it."""
    second, third = (simulate(script, 2, options, f"--warmup-steps {n} --out run{n}") for n in (1, 2))
    assert rows(second) == rows(third)


@pytest.mark.slow
@pytest.mark.parametrize("script, operation", [("train_ddp.py", "all_reduce"), ("train_fsdp2.py", "reduce_scatter")])
def test_a_thousand_ranks(script, operation):
    report = simulate(script, 1024)
    assert ("world", operation) in rows(report)
    assert report["cluster"]["nodes"] == 128
