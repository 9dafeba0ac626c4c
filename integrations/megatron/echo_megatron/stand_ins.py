"""Which packages Echo stands in for where Megatron is used, module by module."""

from __future__ import annotations

from functools import partial

from echo_hooks.stand_ins import StandIn

_PYTORCH = "echo_megatron.te.pytorch"
_RECIPES = "echo_megatron.te.recipes"
_EMPTY = "echo_megatron.te.package"

# Megatron-core alone does without both. Its training loops, and scripts that name Transformer Engine, expect the usual
# container, which has both.
_FRAMEWORKS = ("megatron.training", "megatron.bridge", "nemo")
_WORDS = ("transformer_engine", "transformer-engine", "apex", *_FRAMEWORKS)
_stand_in = partial(StandIn, frameworks=_FRAMEWORKS, words=_WORDS, probed_by=("megatron",))

TRANSFORMER_ENGINE = _stand_in(
    name="transformer_engine",
    modules={
        "transformer_engine": _EMPTY,
        "transformer_engine.common": _EMPTY,
        "transformer_engine.common.recipe": _RECIPES,
        "transformer_engine.pytorch": _PYTORCH,
        "transformer_engine.pytorch.attention": _PYTORCH,
        "transformer_engine.pytorch.attention.rope": _PYTORCH,
        "transformer_engine.pytorch.constants": _PYTORCH,
        "transformer_engine.pytorch.cpp_extensions": _PYTORCH,
        "transformer_engine.pytorch.cpu_offload": _PYTORCH,
        "transformer_engine.pytorch.cross_entropy": _PYTORCH,
        "transformer_engine.pytorch.distributed": _PYTORCH,
        "transformer_engine.pytorch.float8_tensor": _PYTORCH,
        "transformer_engine.pytorch.fp8": _PYTORCH,
        "transformer_engine.pytorch.module": _PYTORCH,
        "transformer_engine.pytorch.module.base": _PYTORCH,
        "transformer_engine.pytorch.ops": "echo_megatron.te.ops",
        "transformer_engine.pytorch.optimizers": _PYTORCH,
        "transformer_engine.pytorch.permutation": _PYTORCH,
        "transformer_engine.pytorch.quantization": _PYTORCH,
        "transformer_engine.pytorch.router": _PYTORCH,
        "transformer_engine.pytorch.tensor": _PYTORCH,
        "transformer_engine.pytorch.tensor.float8_blockwise_tensor": _PYTORCH,
        "transformer_engine.pytorch.tensor.float8_tensor": _PYTORCH,
        "transformer_engine.pytorch.tensor.mxfp8_tensor": _PYTORCH,
        "transformer_engine.pytorch.tensor.nvfp4_tensor": _PYTORCH,
        "transformer_engine.pytorch.tensor.utils": _PYTORCH,
        "transformer_engine.pytorch.utils": _PYTORCH,
    },
    distribution="transformer-engine",
    version="2.9.0",
)

TRANSFORMER_ENGINE_TORCH = _stand_in(
    name="transformer_engine_torch",
    modules={"transformer_engine_torch": "echo_megatron.te.other"},
    distribution="transformer-engine",
    version="2.9.0",
)

APEX = _stand_in(
    name="apex",
    modules={
        "apex": "echo_megatron.apex",
        "apex.multi_tensor_apply": "echo_megatron.apex",
        "apex.normalization": "echo_megatron.apex",
        "apex.normalization.fused_layer_norm": "echo_megatron.apex",
        "apex.optimizers": "echo_megatron.apex",
    },
    distribution="apex",
    version="0.1",
)

AMP_C = _stand_in("amp_C", {"amp_C": "echo_megatron.apex"}, "apex", "0.1")

FUSED_WEIGHT_GRADIENT = _stand_in(
    "fused_weight_gradient_mlp_cuda",
    {"fused_weight_gradient_mlp_cuda": "echo_megatron.apex"},
    "apex",
    "0.1",
)

STAND_INS = (TRANSFORMER_ENGINE, TRANSFORMER_ENGINE_TORCH, APEX, AMP_C, FUSED_WEIGHT_GRADIENT)
