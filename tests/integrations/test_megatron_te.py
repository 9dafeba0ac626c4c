"""Megatron-core with the Transformer Engine spec: every parallel dimension communicates what the plan implies."""

from __future__ import annotations

import pytest
from megatron_plan import BF16, FP32, Plan

pytest.importorskip("megatron.core")

SCRIPT = "mcore_te.py"


def options(plan: Plan) -> str:
    words = [f"--layers {plan.layers} --hidden {plan.hidden} --ffn {plan.ffn} --heads {plan.heads}"]
    words += [f"--groups {plan.groups} --seq {plan.seq} --vocab {plan.vocab} --micro-batch {plan.batch}"]
    words += [f"--micro-batches {plan.micro_batches} --tp {plan.tp} --pp {plan.pp} --cp {plan.cp} --ep {plan.ep}"]
    words += ["--sp"] * plan.sp + ["--llama"] * plan.llama + [f"--cp-comm {plan.cp_comm}"]
    words += [f"--experts {plan.experts} --topk {plan.topk}"] * bool(plan.experts)
    words += [f"--etp {plan.etp}"] * bool(plan.etp)
    return " ".join(words)


def world(plan: Plan) -> int:
    return plan.tp * plan.pp * plan.cp * plan.dp


def within(run, plan: Plan, rank: int, groups=("tp", "cp", "pp")) -> None:
    """The rank's calls on these groups are the plan's, no more and no less."""
    found = {key: value for key, value in run.rows(rank).items() if key[0] in groups}
    assert found == plan.expected(rank)


def of_experts(run, rank: int) -> dict:
    return {key: value for key, value in run.rows(rank).items() if key[0] in ("ep", "etp", "tp-ep")}


def test_tensor_sequence_pipeline_and_context_parallel(simulate):
    plan = Plan(tp=2, pp=2, cp=2, sp=True, micro_batches=3, groups=4, llama=True)
    run = simulate(SCRIPT, world(plan), options(plan))
    for rank in range(world(plan)):
        within(run, plan, rank)
        # No overlap: one bucket a rank holds all gradients, in float32.
        assert run.rows(rank)["dp-cp", "all_reduce"] == (1, FP32 * plan.shared_parameters(rank))
        assert run.rows(rank)["mp", "all_reduce"] == (1, FP32)  # the gradients' norm
    notes = [a["value"] for a in run.report["assumptions"] if a["kind"] == "note"]
    assert any("transformer-engine is not installed here" in str(note) for note in notes) or any(
        "transformer-engine cannot run" in str(note) for note in notes
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        Plan(tp=2),
        Plan(tp=4, sp=True, dp=2),
        Plan(cp=2),
        Plan(cp=4, tp=2, sp=True, llama=True, groups=4),
        Plan(cp=2, cp_comm="all_gather"),
        Plan(cp=4, cp_comm="all_gather", groups=2),
        Plan(cp=2, cp_comm="a2a"),
        Plan(cp=4, cp_comm="a2a", tp=2, groups=8),
        Plan(pp=4, micro_batches=5, tp=2, sp=True),
    ],
    ids=str,
)
def test_dense(simulate, plan):
    run = simulate(SCRIPT, world(plan), options(plan))
    for rank in range(world(plan)):
        within(run, plan, rank)


def test_experts(simulate):
    plan = Plan(tp=2, ep=4, etp=1, dp=2, sp=True, experts=8)
    run = simulate(SCRIPT, world(plan), options(plan))
    for rank in range(world(plan)):
        within(run, plan, rank)
        assert of_experts(run, rank) == plan.expected_of_experts()
    printed = run.printed("parameters")
    for rank, (count, experts) in printed.items():
        assert (count, experts) == (plan.shared_parameters(rank) + plan.expert_parameters, plan.expert_parameters)


@pytest.mark.slow
def test_parameters_and_layers_of_all_ranks_are_the_model(simulate):
    """Summed over ranks, less replicas: whole embeddings, an uneven pipeline, experts on their ranks."""
    plan = Plan(tp=2, pp=2, dp=2, ep=2, sp=True, experts=4, layers=4)
    run = simulate(SCRIPT, world(plan), options(plan), "--trace-ranks all")
    printed, layers = run.printed("parameters"), run.printed("layers")
    assert len(printed) == world(plan)
    # Tensor-parallel pair 0-1, data-parallel 2-3 (their experts differ), stage two from 4 on.
    shared = sum(printed[r][0] - printed[r][1] for r in (0, 1, 4, 5))
    replicas = plan.layers * plan.replicated + plan.norm  # counted by both ranks of a tensor-parallel pair
    experts = sum(printed[r][1] for r in range(8))
    assert shared - replicas + experts == plan.whole
    assert [layers[r][0] for r in (0, 4)] == [2, 2]
    uneven = simulate(SCRIPT, 2, "--layers 5 --pp 2 --first-layers 2", "--trace-ranks all")
    assert [uneven.printed("layers")[r][0] for r in (0, 1)] == [2, 3]
    layout = simulate(SCRIPT, 2, "--layers 4 --pp 2 --layout Et|tttL", "--trace-ranks all")
    assert [layout.printed("layers")[r][0] for r in (0, 1)] == [1, 3]


@pytest.mark.slow
def test_distributed_optimizer_overlapped(simulate):
    """Gradients are scattered and parameters gathered once, in buckets; padding adds less than a bucket's alignment."""
    plan = Plan(dp=4)
    run = simulate(SCRIPT, 4, options(plan) + " --distributed-optimizer --overlap-grad --overlap-param")
    rows, count = run.rows(0), plan.shared_parameters(0)
    calls, size = rows["dp-cp", "reduce_scatter"]
    assert calls >= 1 and 0 <= size - FP32 * count < FP32 * 4096
    calls, gathered = rows["dp-cp", "all_gather"]
    assert gathered == size // 2  # the same padded buckets, in bfloat16
    assert ("dp-cp", "all_reduce") not in rows


@pytest.mark.slow
def test_virtual_pipeline(simulate):
    """Each rank holds two chunks: every micro-batch passes each of the four twice, less the ends."""
    plan = Plan(pp=2, micro_batches=4)
    run = simulate(SCRIPT, 2, options(plan) + " --vpp 2")
    activation = plan.tokens * plan.hidden * BF16
    for rank in (0, 1):
        rows = run.rows(rank)
        # Three boundaries between four chunks, forward on one side and backward on the other.
        assert rows["pp", "send"] == rows["pp", "recv"] == (3 * 4, 3 * 4 * activation)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputation(simulate, kind):
    plan = Plan(tp=2, sp=True)
    before = simulate(SCRIPT, 2, options(plan))
    after = simulate(SCRIPT, 2, options(plan) + f" --recompute {kind}")
    steps, activation = plan.layers * plan.micro_batches, plan.tokens * plan.hidden * BF16
    again = 2 * steps if kind == "full" else 0  # each layer's forward once more; attention alone communicates nothing
    for operation in ("all_gather", "reduce_scatter"):
        calls, size = before.rows(0)["tp", operation]
        assert after.rows(0)["tp", operation] == (calls + again, size + again * activation)
    peaks = [run.report["roles"][0]["peak_allocated_bytes"] for run in (before, after)]
    assert peaks[1] < peaks[0]


@pytest.mark.slow
def test_eight_bits(simulate):
    """Forward gathers and the gradient's travel in 8 bits; scaling factors are reduced over all ranks."""
    plan = Plan(tp=2, sp=True)
    run = simulate(SCRIPT, 2, options(plan) + " --fp8 delayed")
    rows = run.rows(0)
    steps, m = plan.layers * plan.micro_batches, plan.micro_batches
    elements = plan.tokens * plan.hidden
    layers, rest = 6 * steps * elements, 3 * m * elements * BF16  # embedding and output layer stay in 16 bits
    assert rows["tp", "all_gather"] == (6 * steps + 3 * m, layers + rest)
    products = 4 * plan.layers
    # After each forward pass three maxima a product, after each backward pass two.
    assert rows["tp-dp-cp", "all_reduce"] == (2 * m, m * FP32 * products * (3 + 2))


@pytest.mark.slow
def test_megatron_fsdp(simulate):
    """Parameters are gathered for forward and for backward, gradients scattered once: all of the model."""
    plan = Plan(dp=2)
    rows = simulate(SCRIPT, 2, options(plan) + " --fsdp").rows(0)
    gathered = sum(size for (_, operation), (_, size) in rows.items() if operation == "all_gather")
    scattered = sum(size for (_, operation), (_, size) in rows.items() if operation == "reduce_scatter")
    units = plan.layers * (plan.attention_weights + plan.mlp_weights)
    assert gathered >= 2 * plan.micro_batches * units * BF16
    assert scattered >= plan.shared_parameters(0) * BF16


@pytest.mark.slow
@pytest.mark.parametrize("plan", [Plan(tp=2, ep=4, dp=4, sp=True, experts=8), Plan(ep=2, dp=2, experts=4)], ids=str)
def test_experts_cut_by_tensor_parallelism(simulate, plan):
    run = simulate(SCRIPT, world(plan), options(plan) + " --fused-permute")
    for rank in range(world(plan)):
        within(run, plan, rank)
        assert of_experts(run, rank) == plan.expected_of_experts()


@pytest.mark.slow
def test_products_under_tensor_parallel_communication(simulate):
    """User buffers: each gather forward and of the gradient is a ring of tp - 1 messages, each scatter forward four."""
    plan = Plan(tp=4, sp=True)
    before, after = (simulate(SCRIPT, 4, options(plan) + more).rows(0) for more in ("", " --overlap-tp"))
    steps, activation = plan.layers * plan.micro_batches, plan.tokens * plan.hidden * BF16
    ring = 2 * 2 * steps  # two blocks a layer, forward (column) and backward (row)
    assert after["tp", "send"] == after["tp", "recv"] == (3 * ring, 3 * ring * activation // 4)
    calls, size = before["tp", "all_gather"]
    assert after["tp", "all_gather"] == (calls - ring, size - ring * activation)
    calls, size = before["tp", "reduce_scatter"]
    scattered = 2 * steps  # row-parallel products forward
    assert after["tp", "reduce_scatter"] == (calls + 3 * scattered, size)


# ---- the models people train ----


@pytest.mark.slow
def test_gpt_175b_on_96_ranks(simulate):
    plan = Plan(96, 12288, heads=96, seq=2048, vocab=51200, batch=1, micro_batches=12, tp=8, pp=12, sp=True)
    run = simulate(SCRIPT, 96, options(plan) + " --distributed-optimizer --fuse-wgrad")
    for rank in range(0, 96, 8):
        within(run, plan, rank)
        assert run.rows(rank)["intra-dist-opt", "all_reduce"] == (1, FP32)
    assert len(run.report["roles"]) >= 12  # a stage each; first ranks count what all tensor-parallel ones hold alike


@pytest.mark.slow
def test_mixtral_8x7b_on_64_ranks(simulate):
    plan = Plan(
        32, 4096, 14336, 32, 8, seq=4096, vocab=32000, batch=1, micro_batches=4, tp=2, ep=8, pp=4, dp=8, sp=True,
        llama=True, experts=8,
    )  # fmt: skip
    run = simulate(SCRIPT, 64, options(plan) + " --distributed-optimizer --fuse-wgrad")
    for rank in range(0, 64, 16):
        within(run, plan, rank)
        assert of_experts(run, rank) == plan.expected_of_experts()
        calls, size = run.rows(rank)["dp-cp", "reduce_scatter"]
        assert calls == 1 and 0 <= size - FP32 * plan.shared_parameters(rank) < FP32 * 4096


@pytest.mark.slow
def test_llama_3_70b_on_128_ranks(simulate):
    plan = Plan(
        80, 8192, 28672, 64, 8, seq=8192, vocab=128256, batch=1, micro_batches=4, tp=8, cp=2, pp=4, dp=2, sp=True,
        llama=True,
    )  # fmt: skip
    run = simulate(SCRIPT, 128, options(plan) + " --distributed-optimizer --fuse-wgrad")
    for rank in range(0, 128, 8):
        within(run, plan, rank)
        calls, size = run.rows(rank)["dp-cp", "reduce_scatter"]
        assert calls == 1 and 0 <= size - FP32 * plan.shared_parameters(rank) < FP32 * 4096


# ---- experts that are not chosen equally often ----


@pytest.mark.slow
def test_a_hot_expert(simulate):
    """Its rank gets more rows, all ranks agree on how many, and the report shows the balanced figures beside."""
    plan = Plan(ep=4, dp=4, experts=8)
    run = simulate(SCRIPT, 4, options(plan), "--moe-skew hot=2.0")
    even = run.report["moe"]["balanced"]
    assert run.report["moe"]["skew"] == "hot=2.0"
    assert run.report["step_time_ms"] > 0 and even["step_time_ms"] > 0
    hot, other = (run.rows(rank)["ep", "all_to_all"] for rank in (0, 1))
    assert hot[0] == other[0] and hot[1] > other[1]


@pytest.mark.slow
def test_sampled_experts(simulate):
    """What one rank sends is what another expects (or the composer would say so), also when layers run again."""
    plan = Plan(ep=2, dp=2, experts=4)
    run = simulate(SCRIPT, 2, options(plan) + " --recompute full", "--moe-skew sampled")
    assert run.report["moe"]["skew"] == "sampled"
