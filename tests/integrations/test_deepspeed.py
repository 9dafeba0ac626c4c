"""DeepSpeed's engine on the pretended device: collectives, counts and bytes, as its documentation has them by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

HIDDEN, LAYERS, VOCABULARY, SEQUENCE, BATCH, WORLD = 64, 2, 128, 32, 2, 4
BLOCK = 2 * HIDDEN + (HIDDEN + 1) * 4 * HIDDEN + (4 * HIDDEN + 1) * HIDDEN
EMBEDDING, HEAD = VOCABULARY * HIDDEN, (HIDDEN + 1) * VOCABULARY
PARAMETERS = EMBEDDING + LAYERS * BLOCK + HEAD
MODULES = 2 + 3 * LAYERS  # those that own parameters
BF16, FP32, FLAG = 2, 4, 1
EXAMPLES = Path(__file__).parents[2] / "examples"
ONE_RANK = "--trace-ranks 0"

# Every module gathers its parameters when it needs them and lets them go at once.
NOTHING_KEPT = {
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}


def train(simulate, zero: dict, *options: str, own=ONE_RANK, dtype="bf16"):
    config = json.dumps({dtype: {"enabled": True}, "zero_optimization": zero}, separators=(",", ":"))
    return simulate("ds_training.py", WORLD, " ".join(["--config", config, *options]), own)


def communication(run, rank: int = 0) -> dict[tuple[str, str], tuple[float, int]]:
    return run.rows(rank)


def test_stage_3_with_zero_init(simulate):
    run = train(simulate, NOTHING_KEPT, "--zero-init")
    assert communication(run) == {
        ("world", "all_gather"): (2 * MODULES, 2 * BF16 * PARAMETERS),  # forward and backward
        ("world", "reduce_scatter"): (1, BF16 * PARAMETERS),  # one bucket
        ("world", "all_reduce"): (1, FP32 + FLAG + 3),  # squared norm and overflow, as float32
    }
    assert run.report["step_time_ms"] > 0


def test_a_pipeline(simulate):
    run = simulate("ds_pipeline.py", 4)
    activation = BATCH * SEQUENCE * HIDDEN * BF16
    stages = EMBEDDING + 2 * BLOCK, 2 * BLOCK + HEAD
    for rank in range(4):
        talk = communication(run, rank)
        assert talk["world", "send"] == talk["world", "recv"] == (4, 4 * activation)
        loss = rank // 2  # the last stage averages its loss first
        assert talk["dp", "all_reduce"] == (1 + loss, BF16 * stages[rank // 2] + FP32 * loss)
        assert talk["dp", "all_gather"] == (1, BF16 * stages[rank // 2])
        assert talk["mp", "all_reduce"] == (1, FP32)  # the norm
        assert talk["pp", "broadcast"] == (1, 2 * FP32)  # the losses


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["torch", "FusedAdam", "Adam", "Lamb"])
def test_stage_0(simulate, optimizer):
    run = train(simulate, {"stage": 0}, "--optimizer", optimizer)
    assert communication(run)["dp", "all_reduce"] == (1, BF16 * PARAMETERS)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("dtype", "optimizer"), [("bf16", "FusedAdam"), ("fp16", "Lion"), ("bf16", "torch")])
def test_stages_1_and_2(simulate, stage, dtype, optimizer):
    """Gradients are summed to their owners by an all-reduce of the bucket; the owners' parameters are gathered."""
    talk = communication(train(simulate, {"stage": stage}, "--optimizer", optimizer, dtype=dtype))
    assert talk == {
        ("dp", "all_reduce"): (3, BF16 * PARAMETERS + FP32 + FLAG),  # gradients, norm, overflow
        ("dp", "all_gather"): (1, BF16 * PARAMETERS),
    }


@pytest.mark.slow
def test_offload_of_the_optimizer(simulate):
    """Gradients go to the host, parameters come back; the update itself is the host's."""
    run = train(simulate, {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "--optimizer", "Adam",
                   "--hidden", "1024")  # fmt: skip
    said = " ".join(a["value"] for a in run.report["assumptions"])
    assert "the host's own work on large tensors" in said
    assert run.report["breakdown"]["host"] > 0


@pytest.mark.slow
def test_offload_of_parameters(simulate):
    zero = {**NOTHING_KEPT, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    run = train(simulate, zero, "--zero-init", "--optimizer", "Adam")
    assert communication(run)["world", "all_gather"] == (2 * MODULES, 2 * BF16 * PARAMETERS)


@pytest.mark.slow
def test_quantized_weights(simulate):
    """qwZ: each gather is one of 8-bit values and one of scales, a float32 for each group on each rank."""
    run = train(simulate, {**NOTHING_KEPT, "zero_quantized_weights": True}, "--zero-init")
    scales = FP32 * WORLD * MODULES  # every shard is small enough for one group
    assert communication(run)["world", "all_gather"] == (4 * MODULES, 2 * (PARAMETERS + scales))


@pytest.mark.slow
def test_hierarchical_partitioning(simulate):
    """hpZ: backward gathers within the node."""
    talk = communication(train(simulate, {**NOTHING_KEPT, "zero_hpz_partition_size": 2}, "--zero-init",
                               own=f"--cluster h100-sxm:2x2 {ONE_RANK}"))  # fmt: skip
    assert talk["world", "all_gather"] == talk["hpz", "all_gather"] == (MODULES, BF16 * PARAMETERS)


@pytest.mark.slow
def test_quantized_gradients(simulate):
    """qgZ: matrices go through two all-to-alls of 4-bit values, first in the node, then across; vectors do not."""
    talk = communication(train(simulate, {**NOTHING_KEPT, "zero_quantized_gradients": True}, "--zero-init",
                               own=f"--cluster h100-sxm:2x2 {ONE_RANK}"))  # fmt: skip
    shapes = [(VOCABULARY, HIDDEN), *[(4 * HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN)] * LAYERS, (VOCABULARY, HIDDEN)]
    in_node = sum(m * n // 2 + FP32 * max(m, n) for m, n in shapes)  # a group for each row or column
    across = sum(m * n // 4 + FP32 * max(m, n) // 2 for m, n in shapes)
    assert talk["node", "all_to_all"] == (2 * len(shapes), in_node)
    assert talk["across-nodes", "all_to_all"] == (2 * len(shapes), across)
    vectors = PARAMETERS - sum(m * n for m, n in shapes)
    assert talk["world", "reduce_scatter"] == (4 * LAYERS + 1, BF16 * vectors)


@pytest.mark.slow
def test_experts(simulate):
    talk = communication(simulate("ds_moe.py", 4, "", ONE_RANK))
    expert = (HIDDEN + 1) * 4 * HIDDEN + (4 * HIDDEN + 1) * HIDDEN
    tokens = BATCH * SEQUENCE * HIDDEN * BF16
    assert talk["ep", "all_to_all"] == (4, 4 * tokens)  # to the experts and back, forward and backward
    assert talk["ep-dp", "all_reduce"] == (1, BF16 * 2 * expert)  # two of the four live here
    assert talk["dp", "all_reduce"] == (1, BF16 * (EMBEDDING + HEAD + 4 * HIDDEN))  # and the gate


@pytest.mark.slow
def test_sequence_parallel_attention(simulate):
    run = simulate("ds_ulysses.py", 4, "", ONE_RANK)
    talk = communication(run)
    assert talk["sp", "all_to_all"] == (8, 8 * BATCH * SEQUENCE * HIDDEN * BF16)  # q, k, v, output; twice
    parameters = EMBEDDING + 3 * (HIDDEN + 1) * HIDDEN + (HIDDEN + 1) * HIDDEN + HEAD
    assert talk["dp-sp", "all_gather"] == (1, BF16 * parameters)
    assert run.report["tokens_per_second"] * run.report["step_time_ms"] / 1e3 == pytest.approx(4 * BATCH * SEQUENCE)


@pytest.mark.slow
def test_the_second_step_is_a_typical_one(simulate):
    """The throughput timer synchronises from the third step on unless it is patched; ZeRO-3 plans in the first."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 10}
    early, late = (train(simulate, zero, "--zero-init", own=f"{ONE_RANK} --warmup-steps {n} --steps 2") for n in "13")
    assert communication(early) == communication(late)
    assert not [a for a in early.report["assumptions"] if "communicate" in a["value"]]


@pytest.mark.slow
def test_stage_3_of_13_billion_parameters_on_64_ranks(simulate):
    """GPT of 40 layers, hidden 5120 (13.1e9 parameters), by DeepSpeed's default sizes.

    Vectors (norms; at most 1e5 elements) stay whole on every rank: after the update each is gathered by itself.
    Matrices are gathered in forward and again in backward, those excepted that are alive then: at most 1e9 elements
    (stage3_max_live_parameters). A gather carries one matrix, or several that are fetched ahead together.
    """
    layers, hidden, heads, sequence, vocabulary, ranks = 40, 5120, 40, 2048, 50304, 64
    sizes = f"--layers {layers} --hidden {hidden} --heads {heads} --seq {sequence} --vocab {vocabulary} --micro-batch 1"
    script = str(EXAMPLES / "train_deepspeed.py")
    run = simulate(script, ranks, f"{sizes} --zero 3 --micro-batches 1", "--trace-ranks 0,63")
    talk = communication(run)
    elements = layers * 12 * hidden**2 + 2 * vocabulary * hidden + sequence * hidden
    matrices, vectors = layers * 6 + 3, layers * 4 + 2
    parameters = elements + vectors * hidden
    assert parameters == 13_109_340_160
    assert talk["world", "reduce_scatter"][1] == BF16 * parameters
    assert talk["world", "all_reduce"] == (1, 8)
    calls, gathered = talk["world", "all_gather"]
    kept = 2 * BF16 * elements + BF16 * vectors * hidden - gathered
    assert 0 < kept <= BF16 * 10**9
    assert vectors + matrices < calls <= vectors + 2 * matrices
    assert [role["ranks"] for role in run.report["roles"]] == [list(range(ranks))]
    # Weights of 2 bytes, a 32-bit copy and two moments, sharded; vectors whole.
    assert run.report["roles"][0]["peak_allocated_bytes"] > 14 * elements / ranks
