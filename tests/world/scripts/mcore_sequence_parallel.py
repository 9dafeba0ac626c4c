"""train_mcore.py with sequence parallelism: the local spec's LayerNorm refuses it, though torch's can do it."""

import runpy
import sys
from pathlib import Path

import torch
from megatron.core.transformer import torch_norm


def norm(cls, config, hidden_size, eps=1e-5, **_):
    layer = torch.nn.LayerNorm(hidden_size, eps)
    for parameter in layer.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return layer


torch_norm.WrappedTorchNorm.__new__ = norm
example = Path(sys.path[0]).parents[2] / "examples" / "train_mcore.py"
sys.path[0] = str(example.parent)
sys.argv = [str(example), "--sequence-parallel", *sys.argv[1:]]
runpy.run_path(str(example), run_name="__main__")
