"""megatron.training's own loop: timers, straggler and rerun code, loss and norm reductions, on a pretended device."""

from __future__ import annotations

import importlib.util

import pytest
from megatron_plan import FP32, Plan

pytest.importorskip("megatron.core")
if importlib.util.find_spec("megatron.training") is None:
    pytest.skip(
        "megatron.training is not installed (megatron-core ships it from 0.19, Python 3.12)", allow_module_level=True
    )
pytest.importorskip("megatron.training.argument_utils", reason="megatron.training before 0.19 is called differently")

OPTIONS = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --transformer-impl transformer_engine --bf16"
    " --lr 1e-4 --train-iters 4 --split 99,1,0 --eval-iters 0 --eval-interval 100 --log-interval 1"
    " --position-embedding-type rope --num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32"
    " --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --untie-embeddings-and-output-weights"
    " --disable-bias-linear --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"
    " --use-distributed-optimizer"
)


@pytest.mark.slow
def test_pretrain_on_mock_data(simulate, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    run = simulate("megatron_pretrain.py", 8, OPTIONS)
    plan = Plan(tp=2, pp=2, dp=2, sp=True, micro_batches=2)
    for rank in (0, 4):
        found, expected = run.rows(rank), plan.expected(rank)
        for key in (("tp", "all_gather"), ("tp", "reduce_scatter"), ("pp", "send"), ("pp", "recv")):
            assert found[key] == expected[key]
        assert found["intra-dist-opt", "all_reduce"][0] >= 1
        calls, size = found["dp-cp", "reduce_scatter"]
        assert calls == 1 and size > FP32 * plan.local_layers * (plan.attention_weights + plan.mlp_weights) // plan.tp
