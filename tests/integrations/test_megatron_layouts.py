"""Illegal layouts of Megatron: its own errors, and the one line of arithmetic read from their frames."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core")
torch = pytest.importorskip("torch")

from megatron.core.transformer.transformer_block import get_num_layers_to_build  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from echo_megatron.layout import explain  # noqa: E402


def config(**values) -> TransformerConfig:
    return TransformerConfig(**{"num_layers": 8, "hidden_size": 64, "num_attention_heads": 8, **values})


def arithmetic(call) -> str:
    """The line for the error that Megatron itself raises."""
    with pytest.raises((AssertionError, ValueError, RuntimeError)) as caught:
        call()
    line = explain(caught.value)
    assert line is not None and "\n" not in line
    return line


def test_heads():
    # 14 heads on TP 4
    line = arithmetic(lambda: config(num_attention_heads=14, hidden_size=56, tensor_model_parallel_size=4))
    assert line.startswith("14 attention heads / TP 4 = 3.5, not whole; nearest legal: TP 2 or TP 7")


def test_kv_heads():
    # pytorch/torchtitan PR 2577: 2 KV heads on TP 4 are replicated by Megatron. There is no rule of Echo's own.
    config(num_query_groups=2, tensor_model_parallel_size=4)
    line = arithmetic(lambda: config(num_attention_heads=12, hidden_size=48, num_query_groups=6,
                                     tensor_model_parallel_size=4))  # fmt: skip
    assert line.startswith("6 KV heads / TP 4 = 1.5, not whole; nearest legal: TP 3 or TP 6")


@pytest.mark.parametrize(
    ("layers", "values", "start", "end"),
    [
        # NVIDIA/Megatron-LM#1304, modelscope/ms-swift#5737
        (30, {}, "30 layers / PP 4 = 7.5, not whole; nearest legal: PP 3 or PP 5, or 28 or 32 layers",
         "stages of 7/8/8/7 layers (first stage 7, last stage 7)"),
        (31, {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
         "33 layers (embedding and loss counted) / PP 4 = 8.25", ""),
        (30, {"num_layers_in_first_pipeline_stage": 7}, "23 layers left (30 - 7) / stages 3 = 7.667", ""),
        # NVIDIA/Megatron-LM#468: 80 layers, PP 16 and 2 layers per virtual stage make 2.5 virtual stages
        (20, {"virtual_pipeline_model_parallel_size": 2}, "5 layers a stage (20 / PP 4) / VPP 2 = 2.5", ""),
    ],
)  # fmt: skip
def test_layers(layers, values, start, end):
    def call():
        built = config(num_layers=layers, pipeline_model_parallel_size=4, pipeline_dtype=torch.bfloat16, **values)
        for stage in range(4):
            get_num_layers_to_build(built, 0, stage)

    line = arithmetic(call)
    assert line.startswith(start) and line.endswith(end)


def test_experts():
    line = arithmetic(lambda: _moe(config(num_moe_experts=6, expert_model_parallel_size=4)))
    assert line.startswith("6 experts / EP 4 = 1.5, not whole; nearest legal: EP 3 or EP 6, or 4 or 8 experts")


def _moe(config):
    assert config.num_moe_experts % config.expert_model_parallel_size == 0  # as MoELayer has it, without its groups


def test_an_error_of_another_kind_has_no_line():
    with pytest.raises(ValueError) as caught:
        config(num_moe_experts=-1)
    assert explain(caught.value) is None
