"""Gets ready, says so, and goes on for ever: for the test that interrupts it."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.ones(1, device="cuda")
Path(sys.argv[1]).write_text("ready")
time.sleep(600)
