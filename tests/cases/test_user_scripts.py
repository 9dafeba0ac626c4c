"""Training loops as users have them: each is simulated at world 8, and its communication is what the script says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from echo_launch.main import main

CASES = Path(__file__).parent
WORLD = 8


@pytest.fixture(scope="module")
def report(here):
    """The report of one script, simulated once."""
    reports: dict[str, dict] = {}

    def simulate(script: str) -> dict:
        if script not in reports:
            out = here / script
            arguments = ["--simulate", "--world-size", str(WORLD), "--quiet", "--out", str(out)]
            assert main([*arguments, str(CASES / f"{script}.py")]) == 0
            reports[script] = json.loads((out / "report.json").read_text())
        return reports[script]

    return simulate


def communication(report: dict, role: int = 0) -> dict[tuple[str, str], tuple[float, int]]:
    """(group, operation) -> calls and bytes of a step."""
    rows = report["roles"][role]["communication"]
    return {(row["group"], row["operation"]): (row["calls"], row["bytes"]) for row in rows}


def assumed(report: dict) -> set[str]:
    return {a["kind"] for a in report["assumptions"]} - {"note"}


def test_evaluation_and_checkpoint_in_every_step(report):
    """Adam on an embedding and a linear layer; the evaluation's sum, a barrier, objects over gloo."""
    found = report("evaluation")
    parameters = 100 * 32 + 256 * 100 + 100
    talk = communication(found)
    assert talk["world", "all_reduce"] == (2, 4 * parameters + 2 * 4)
    assert talk["world", "barrier"][0] == 1
    assert talk["group1", "all_gather"][0] == 2  # sizes, then pickles
    assert set(talk) == {("world", "all_reduce"), ("world", "barrier"), ("group1", "all_gather")}
    # Tokens of the evaluation are not trained on.
    tokens = found["tokens_per_second"] * found["step_time_ms"] / 1e3
    assert math.isclose(tokens, WORLD * 4 * 8, rel_tol=1e-9)
    assert len(found["roles"]) == 1


def test_synchronised_batch_norm_and_prefetch(report):
    found = report("prefetch")
    weights = 3 * 16 * 9 + 2 * 16 + 16 * 32 * 9 + 32 + 2 * 32 + 32 * 10 + 10
    talk = communication(found)
    # Forward of each norm gathers mean, deviation and count; backward sums two rows. Buffers are rank 0's in floats
    # and, apart, the two integer counters.
    assert talk["world", "all_gather"] == (2, WORLD * 4 * sum(2 * c + 1 for c in (16, 32)))
    assert talk["world", "all_reduce"] == (3, 4 * (weights + sum(2 * c for c in (16, 32))))
    assert talk["world", "broadcast"] == (2, 4 * sum(2 * c for c in (16, 32)) + 2 * 8)
    assert not {a for a in assumed(found) if a.startswith("op priced")}


@pytest.mark.slow
def test_a_data_loader_with_workers(report):
    found = report("input_pipeline")
    parameters = 64 * 128 + 128 + 128 * 10 + 10
    assert communication(found) == {("world", "all_reduce"): (1, 4 * parameters)}  # once in four micro-batches
    assert [role["ranks"][0] for role in found["roles"]] == [0, 1]  # rank 0 alone prints its loss


@pytest.mark.slow
def test_gradient_scaler_checkpointing_and_moving_average(report):
    found = report("mixed_precision")
    block = 3 * 64 * 64 + 3 * 64 + 64 * 64 + 64 + 2 * (64 * 128) + 128 + 64 + 4 * 64
    assert communication(found) == {("world", "all_reduce"): (1, 4 * (3 * block + 64 * 64 + 64))}
    assert "overflow of unknown gradients" in assumed(found)
    assert any("torch.compile" in a["value"] for a in found["assumptions"])


@pytest.mark.slow
def test_no_wrapper_and_two_optimizers(report):
    found = report("by_hand")
    generator, critic = 32 * 32 + 32, 32 + 1
    talk = communication(found)
    # The generator's backward fills the critic's gradients too, but each average sends its own model's.
    assert talk["world", "all_reduce"] == (2, 4 * (generator + critic))
    assert talk["group1", "reduce_scatter"] == (1, 4 * 32 * 32)
    assert talk["world", "gather"] == (1, 4 * WORLD)
    assert sorted(rank for role in found["roles"] for rank in role["ranks"]) == list(range(WORLD))


@pytest.mark.slow
def test_fully_sharded_data_parallel_the_class(report):
    """Three blocks and the root gather in forward; all but the root, kept since, gather again in backward."""
    found = report("fsdp1")
    talk = communication(found)
    assert talk["world", "all_gather"][0] == 4 + 3
    assert talk["world", "reduce_scatter"][0] == 4
    assert talk["world", "all_reduce"] == (1, 4)  # the norm
