"""Megatron-core GPT with the Transformer Engine spec and every parallel dimension, mock data."""

import argparse
import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

p = argparse.ArgumentParser()
for flag, default in (
    ("--layers", 4), ("--hidden", 64), ("--ffn", 0), ("--heads", 8), ("--groups", 0), ("--seq", 32), ("--vocab", 128),
    ("--micro-batch", 2), ("--micro-batches", 2), ("--steps", 3),
    ("--tp", 1), ("--pp", 1), ("--cp", 1), ("--ep", 1), ("--topk", 2),
):  # fmt: skip
    p.add_argument(flag, type=int, default=default)
for flag in ("--vpp", "--etp", "--experts", "--first-layers", "--last-layers"):
    p.add_argument(flag, type=int)
for flag in (
    "--sp", "--distributed-optimizer", "--overlap-grad", "--overlap-param", "--llama", "--fuse-wgrad", "--fsdp",
    "--overlap-p2p", "--overlap-tp", "--fused-permute", "--no-grouped",
):  # fmt: skip
    p.add_argument(flag, action="store_true")
p.add_argument("--cp-comm", default="p2p")
p.add_argument("--layout")
p.add_argument("--dispatcher", default="alltoall")
p.add_argument("--recompute", choices=["full", "selective"])
p.add_argument("--fp8", choices=["delayed", "tensorwise", "blockwise", "mxfp8"])
p.add_argument("--balancing", default="aux_loss")
a = p.parse_args()

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
hcp = [2, a.cp // 2] if a.cp_comm == "a2a+p2p" else None
mpu.initialize_model_parallel(
    a.tp, a.pp, a.vpp, context_parallel_size=a.cp, expert_model_parallel_size=a.ep, expert_tensor_parallel_size=a.etp,
    hierarchical_context_parallel_sizes=hcp,
)  # fmt: skip
tensor_parallel.model_parallel_cuda_manual_seed(1234)
llama = dict(normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu)
moe = dict(
    num_moe_experts=a.experts, moe_router_topk=a.topk, moe_token_dispatcher_type=a.dispatcher,
    moe_grouped_gemm=not a.no_grouped, moe_router_load_balancing_type=a.balancing, moe_aux_loss_coeff=0.01,
    moe_permute_fusion=a.fused_permute,
)  # fmt: skip
settings = dict(
    num_layers=a.layers, hidden_size=a.hidden, num_attention_heads=a.heads, num_query_groups=a.groups or None,
    ffn_hidden_size=a.ffn or 4 * a.hidden, add_bias_linear=False, tensor_model_parallel_size=a.tp,
    pipeline_model_parallel_size=a.pp, virtual_pipeline_model_parallel_size=a.vpp, context_parallel_size=a.cp,
    expert_model_parallel_size=a.ep, expert_tensor_parallel_size=a.etp, cp_comm_type=a.cp_comm,
    hierarchical_context_parallel_sizes=hcp,
    sequence_parallel=a.sp, bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
    hidden_dropout=0.0, attention_dropout=0.0, gradient_accumulation_fusion=a.fuse_wgrad,
    num_layers_in_first_pipeline_stage=a.first_layers, num_layers_in_last_pipeline_stage=a.last_layers,
    pipeline_model_parallel_layout=a.layout, overlap_p2p_comm=a.overlap_p2p, batch_p2p_comm=not a.overlap_p2p,
    tp_comm_overlap=a.overlap_tp,
    recompute_granularity=a.recompute, recompute_method="uniform" if a.recompute == "full" else None,
    recompute_num_layers=1 if a.recompute == "full" else None,
    fp8="hybrid" if a.fp8 else None, **(dict(fp8_recipe=a.fp8) if a.fp8 else {}),
    **(llama if a.llama else {}), **(moe if a.experts else {}),
)  # fmt: skip
config = TransformerConfig(**{name: value for name, value in settings.items() if value is not None})
ddp = DistributedDataParallelConfig(
    grad_reduce_in_fp32=True, overlap_grad_reduce=a.overlap_grad or a.fsdp,
    overlap_param_gather=a.overlap_param or a.fsdp,
    use_distributed_optimizer=a.distributed_optimizer,
    **(dict(use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params") if a.fsdp else {}),
)  # fmt: skip


def build(i):
    kw = {} if a.vpp is None else dict(vp_stage=i)
    if a.experts:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, **kw)
    else:
        spec = get_gpt_layer_with_transformer_engine_spec()
    return GPTModel(
        config, spec, a.vocab, a.seq, pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, **kw),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, **kw),
        share_embeddings_and_output_weights=False, position_embedding_type="rope", **kw,
    ).cuda().bfloat16()  # fmt: skip


def wrap(model, i):
    if a.fsdp:
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

        return FullyShardedDataParallel(config, ddp, model)
    return DistributedDataParallel(config, ddp, model, disable_bucketing=i > 0)


if a.overlap_tp:
    import transformer_engine.pytorch as te

    te.module.base.initialize_ub([a.seq // a.cp * a.micro_batch, a.hidden], a.tp, False, dtype=torch.bfloat16)
models = [wrap(build(i), i) for i in range(a.vpp or 1)]
parameters = sum(q.numel() for m in models for q in m.parameters())
print(
    "parameters",
    dist.get_rank(),
    parameters,
    sum(q.numel() for m in models for n, q in m.named_parameters() if "experts" in n),
)
print("layers", dist.get_rank(), sum(len(getattr(m.module, "module", m.module).decoder.layers) for m in models))
optimizer = get_megatron_optimizer(
    OptimizerConfig(
        optimizer="adam", lr=1e-4, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0,
        use_distributed_optimizer=a.distributed_optimizer or a.fsdp,
        **(dict(overlap_param_gather=True) if a.overlap_param else {}),
    ),
    models,
)  # fmt: skip
config.finalize_model_grads_func = finalize_model_grads
config.grad_scale_func = optimizer.scale_loss
if a.overlap_grad or a.fsdp:
    config.no_sync_func = [m.no_sync for m in models] if a.vpp else models[0].no_sync
    if a.vpp and a.overlap_grad:
        config.grad_sync_func = [m.start_grad_sync for m in models]
local = a.seq // a.cp
tokens = torch.randint(a.vocab, (a.micro_batch, local + 1), device="cuda")
position = torch.arange(local, device="cuda").expand(a.micro_batch, -1)
run = get_forward_backward_func()


def forward_step(_, model):
    out = model(tokens[:, :-1].contiguous(), position, None, labels=tokens[:, 1:].contiguous())
    return out, lambda t: (t.float().mean(), dict(loss=t.detach().float().mean()))


for _ in range(a.steps):
    for m in models:
        m.zero_grad_buffer()
    optimizer.zero_grad()
    run(
        forward_step_func=forward_step, data_iterator=[None] * len(models) if a.vpp else None,
        model=models if a.vpp else models[0], num_microbatches=a.micro_batches, seq_length=a.seq,
        micro_batch_size=a.micro_batch, forward_only=False,
    )  # fmt: skip
    optimizer.step()
dist.destroy_process_group()
