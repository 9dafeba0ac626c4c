"""Megatron's own training loop on mock data: megatron.training.pretrain, as its pretrain_gpt.py calls it."""

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets import utils as dataset_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_timers, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


def batch_of(data_iterator):
    """Tokens, labels, mask and positions on the ranks of the first and last stage, None elsewhere."""
    if not (mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()):
        return None, None, None, None
    batch = next(data_iterator)
    return tuple(batch[name].cuda(non_blocking=True) for name in ("tokens", "labels", "loss_mask", "position_ids"))


def loss_of(mask, output):
    losses, mask = output.view(-1).float(), mask.view(-1).float()
    loss, tokens = (losses * mask).sum(), mask.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.detach().view(1)])}


def forward_step(data_iterator, model):
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    tokens, labels, mask, positions = batch_of(data_iterator)
    timers("batch-generator").stop()
    get_attr_wrapped_model(model, "vp_stage")
    return model(tokens, positions, None, labels=labels), partial(loss_of, mask)


def datasets(samples, vp_stage=None):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed, sequence_length=args.seq_length, blend=None, blend_per_split=None, split=args.split,
        tokenizer=build_tokenizer(args), reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        create_attention_mask=False, path_to_cache=None,
    )  # fmt: skip
    return BlendedMegatronDatasetBuilder(MockGPTDataset, samples, lambda: True, config).build()


if __name__ == "__main__":
    datasets.is_distributed = True
    dataset_utils.compile_helpers = lambda: None  # the wheel brings them compiled, and no makefile
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
