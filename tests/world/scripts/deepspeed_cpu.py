"""train_deepspeed.py on the CPU accelerator, without its shared-memory op, which takes minutes to compile."""

import os
import runpy
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed.comm  # noqa: F401

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
example = Path(sys.path[0]).parents[2] / "examples" / "train_deepspeed.py"
sys.path[0] = str(example.parent)
sys.argv = [str(example), *sys.argv[1:]]
runpy.run_path(str(example), run_name="__main__")
