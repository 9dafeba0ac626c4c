"""The names of ``transformer_engine.pytorch``."""
# ruff: noqa: F401

from echo_megatron.te.attention import DotProductAttention
from echo_megatron.te.base import TransformerEngineBaseModule, get_dummy_wgrad, get_workspace
from echo_megatron.te.communication import allreduce, gather_along_first_dim, reduce_scatter_along_first_dim
from echo_megatron.te.cross_entropy import parallel_cross_entropy
from echo_megatron.te.grouped_linear import Fp8Padding, Fp8Unpadding, GroupedLinear
from echo_megatron.te.layernorm_mlp import LayerNormMLP
from echo_megatron.te.linear import LayerNormLinear, Linear
from echo_megatron.te.norms import LayerNorm, RMSNorm
from echo_megatron.te.optimizers import (
    FusedAdam,
    FusedSGD,
    multi_tensor_adam,
    multi_tensor_applier,
    multi_tensor_axpby,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
    multi_tensor_sgd,
    multi_tensor_unscale_l2norm,
)
from echo_megatron.te.other import (
    TE_DType,
    cast_master_weights_to_fp8,
    cast_to_fp8,
    general_gemm,
    get_cpu_offload_context,
    make_graphed_callables,
    make_weak_ref,
    mark_activation_offload,
    post_all_gather_processing,
    replace_raw_data,
)
from echo_megatron.te.overlapped import UserBufferQuantizationMode, destroy_ub, initialize_ub
from echo_megatron.te.permutation import (
    moe_permute,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from echo_megatron.te.precision import (
    Float8BlockwiseQTensor,
    Float8Tensor,
    FP8GlobalStateManager,
    MXFP8Tensor,
    NVFP4Tensor,
    QuantizedTensor,
    QuantizedTensorBase,
    QuantizedTensorStorage,
    autocast,
    check_fp8_support,
    fp8_autocast,
    fp8_model_init,
    get_default_fp8_recipe,
    quantized_model_init,
)
from echo_megatron.te.random_states import (
    CudaRNGStatesTracker,
    activation_recompute_forward,
    checkpoint,
    get_all_rng_states,
    graph_safe_rng_available,
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
)
from echo_megatron.te.rope import _SplitAlongDim, apply_fused_qkv_rotary_pos_emb, apply_rotary_pos_emb
from echo_megatron.te.router import (
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)
