"""A pipeline of equal layers under DeepSpeed's PipelineModule."""

import argparse

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from ds_block import Block
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--stages", type=int, default=2)
parser.add_argument("--micro-batches", type=int, default=4)
parser.add_argument("--zero", type=int, default=0)
parser.add_argument("--tied", action="store_true")
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
deepspeed.init_distributed()
HIDDEN, VOCABULARY, SEQUENCE = 64, 128, 32


class Loss(nn.Module):
    def forward(self, logits, targets):
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, _):
        tokens = torch.arange(SEQUENCE + 1) % VOCABULARY
        return tokens[:-1], tokens[1:]


def logits(embedding, x):
    return x @ embedding.weight.t()


embedding = (nn.Embedding, VOCABULARY, HIDDEN)
first = TiedLayerSpec("tie", *embedding, tied_weight_attr="weight") if args.tied else LayerSpec(*embedding)
last = LayerSpec(nn.Linear, HIDDEN, VOCABULARY)
if args.tied:
    last = TiedLayerSpec("tie", *embedding, forward_fn=logits, tied_weight_attr="weight")
model = PipelineModule(
    layers=[first, *(LayerSpec(Block, HIDDEN) for _ in range(4)), last],
    num_stages=args.stages,
    loss_fn=Loss(),
    partition_method="uniform",
)
config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": args.micro_batches,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": args.zero},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
}
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=list(model.parameters()), config=config, training_data=Data()
)
for _ in range(100):
    engine.train_batch()
