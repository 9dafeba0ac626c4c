"""A stage builder that rounds down: 6 layers on 4 stages make 4."""

import runpy
import sys
from pathlib import Path

import megatron.core.models.gpt.gpt_layer_specs as specs
import megatron.core.transformer.transformer_block as block


def rounded_down(config, *_, **__):
    return config.num_layers // config.pipeline_model_parallel_size


block.get_num_layers_to_build = specs.get_num_layers_to_build = rounded_down
example = Path(__file__).parents[2] / "examples" / "train_mcore.py"
sys.path.insert(0, str(example.parent))
runpy.run_path(str(example), run_name="__main__")
