"""What the driver's own tool says of this machine's NVIDIA GPUs, without a context on any of them."""

from __future__ import annotations

import csv
import shutil
import subprocess


def query_gpus(*fields: str) -> list[list[str]]:
    """A row for each GPU with the texts of ``fields`` (see ``nvidia-smi --help-query-gpu``); [] without GPU or tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[field.strip() for field in row] for row in csv.reader(answer.stdout.splitlines()) if row]
