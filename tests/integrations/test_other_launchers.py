"""What else people launch with: unmodified scripts for accelerate, transformers' Trainer and Lightning at 16 ranks."""

from __future__ import annotations

import pytest

MLP = 128 * 64 + (64 + 1) * 256 + (256 + 1) * 128
BLOCK = 12 * 64**2 + (3 + 1 + 4 + 1) * 64 + 4 * 64  # attention and MLP with biases, two norms
GPT = (128 + 32) * 64 + 2 * BLOCK + 2 * 64
FP32 = 4
ENDS = "--trace-ranks 0,15"


@pytest.mark.slow
def test_accelerate(simulate):
    pytest.importorskip("accelerate")
    run = simulate("accelerate_loop.py", 16, "", ENDS)
    assert run.rows(0) == {
        ("world", "all_reduce"): (1, FP32 * MLP),  # in the last of two micro-batches
        ("world", "all_gather"): (2, 2 * 16 * FP32),  # the loss of each
    }
    assert run.report["tokens_per_second"] * run.report["step_time_ms"] / 1e3 == pytest.approx(16 * 2 * 4 * 32)


@pytest.mark.slow
def test_transformers_trainer(simulate):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    talk = simulate("hf_trainer.py", 16, "", ENDS).rows(0)
    calls, size = talk["world", "all_reduce"]
    assert calls >= 1 and FP32 * GPT <= size < FP32 * GPT + 256  # and flags of its own


@pytest.mark.slow
def test_lightning(simulate):
    pytest.importorskip("lightning")
    talk = simulate("lightning_loop.py", 16, "", ENDS).rows(0)
    calls, size = talk["world", "all_reduce"]
    assert calls >= 1 and FP32 * MLP <= size < FP32 * MLP + 256


@pytest.mark.slow
def test_torchrun_options(simulate):
    """A launch line as it stands in job scripts."""
    pytest.importorskip("accelerate")
    line = "--rdzv_backend c10d --rdzv_endpoint=host:29500 --rdzv-id 7 --max_restarts=3 --tee 3 --local-ranks-filter 0"
    run = simulate("accelerate_loop.py", 8, "", f"{line} --nnodes=1:1 --nproc_per_node=8 --trace-ranks 0")
    assert run.report["world_size"] == 8
