"""A stand-in for echo_hooks.session: the ranks' programs follow from a small layout instead of a real script.

The "script" is a JSON file: {"tp": 2, "pp": 4, "behaviour": {"5": "raise"}, ...}, so that every test says in one place
what its ranks do.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from layouts import Layout, trace_of

from echo_hooks.errors import ExecuteFailed, NothingSimulated, ScriptError, UsageError
from echo_hooks.graph.rundir import RankTrace


@dataclass(frozen=True)
class Job:
    world_size: int
    nproc_per_node: int
    cluster: str
    script: str = ""
    args: tuple[str, ...] = ()
    module: bool = False
    local_rank_argument: bool = False
    warmup_steps: int = 1
    steps: int = 1
    seed: int = 0
    out: str = ""
    timing: str = "model"
    moe_hot: float = 1.0
    moe_sampled: bool = False


class Tracer:
    def __init__(self, job: Job):
        self.job = job
        self.script = json.loads(Path(job.script).read_text())

    def prepare(self) -> None:
        if self.script.get("everyone") == "no CUDA" and self.job.timing == "execute":
            raise ExecuteFailed("torch 2.11.0 is built without CUDA")
        if "prepare" in self.script:
            raise UsageError(self.script["prepare"])

    def trace(self, rank: int) -> RankTrace:
        behaviour = self.script.get("behaviour", {}).get(str(rank), self.script.get("everyone", ""))
        print(f"hello from rank {rank}", flush=True)
        if behaviour == "raise":
            raise ScriptError(f"rank {rank}: ValueError: bad luck", rank, "Traceback: line 3\nValueError: bad luck\n")
        if behaviour == "no room" and self.job.timing == "execute":
            raise ExecuteFailed(f"rank {rank} does not fit into this GPU's memory: of 80 GiB, 1 GiB are free")
        if behaviour == "no step":
            raise NothingSimulated(f"rank {rank}: the script ended after 0 optimizer step(s)", rank, self.made(rank, 0))
        if behaviour == "internal":
            raise RuntimeError("an error of Echo's own")
        if behaviour == "kill":
            print("last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "exit":
            os._exit(7)
        if behaviour == "sleep":
            subprocess.Popen(["sleep", "600"])  # a helper of the script, in its group
            subprocess.Popen(["sleep", "600"], start_new_session=True)  # one that left it
            Path(self.script["ready"]).write_text(str(os.getpid()))
            time.sleep(600)
        if behaviour == "leave helpers":
            subprocess.Popen(["sleep", "600"])
            subprocess.Popen(["sleep", "600"], start_new_session=True)
        if behaviour == "show":
            print(
                json.dumps({"args": self.job.args, "devices": os.environ["CUDA_VISIBLE_DEVICES"], "path": sys.path[0]})
            )
        if behaviour.startswith("after "):  # fails unless that rank was traced before
            donor = int(behaviour.removeprefix("after "))
            if not (Path(self.job.out) / "ranks" / f"{donor:05d}.parquet").exists():
                time.sleep(0.3)
                raise ScriptError(f"rank {rank}: nothing from {donor}", rank)
        if self.script.get("slow"):
            time.sleep(self.script["slow"])
        return self.made(rank)

    def made(self, rank: int, steps: int = 1) -> RankTrace:
        return trace_of(rank, Layout(self.job.world_size, **self.script.get("layout", {})), steps)
