"""Run example scripts as real gloo processes, or as virtual ranks, and write down what each rank communicated.

    python oracle_run.py real --world 2 --rank 0 --cases FILE --out DIR
    python oracle_run.py virtual --cases FILE --out DIR [--runner module:function]

The truth of the real side is C++'s own: the flight recorder inside ProcessGroupGloo (TORCH_FR_BUFFER_SIZE), which no
Python hook can miss or disturb. It leaves out send and recv and shows a reduce-scatter as the all-reduce by which gloo
makes it, so those three are logged where Python enters the process group.

A case: {"name", "world", "script", "argv"}. Output: one JSON file per (case, rank):
{"collectives": {group ranks: [[kind, bytes, dtype], ...]}, "messages": {...: [[kind, peer, bytes, dtype], ...]},
"reduce_scatters": {...: [bytes, ...]}}.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import runpy
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_stand_ins
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
          "Int": "int32", "Byte": "uint8", "Bool": "bool", "Char": "int8", "Short": "int16"}  # fmt: skip


def script(case: dict) -> None:
    """The example as ``__main__``, left with its process group alive."""
    path = EXAMPLES / case["script"]
    saved = sys.argv, sys.path[0], dist.destroy_process_group
    sys.argv, sys.path[0] = [str(path), *case["argv"]], str(EXAMPLES)
    dist.destroy_process_group = lambda *a, **k: None
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv, sys.path[0], dist.destroy_process_group = saved


def forget_frameworks() -> None:
    """Module-level state that a second run in one process would trip over."""
    mpu = sys.modules.get("megatron.core.parallel_state")
    if mpu is not None:
        mpu.destroy_model_parallel()
    comm = sys.modules.get("deepspeed.comm.comm")
    if comm is not None:
        comm.cdb = None


# ---- the real side ----


class PythonEntries:
    """Sends, receives and reduce-scatters, logged at ProcessGroup's own methods."""

    RECEIVED = {"send": "send", "recv": "recv", "recv_anysource": "recv"}
    SCATTERED = ("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "reduce_scatter_single",
                 "reduce_scatter_single_coalesced")  # fmt: skip

    def __init__(self) -> None:
        self.messages: dict[str, list] = {}
        self.reduce_scatters: dict[str, list] = {}
        for name, kind in self.RECEIVED.items():
            self._wrap(name, lambda group, args, kind=kind: self._message(group, kind, args))
        for name in self.SCATTERED:
            if hasattr(dist.ProcessGroup, name):
                self._wrap(name, self._scattered)

    def _wrap(self, name: str, note: Callable) -> None:
        original = getattr(dist.ProcessGroup, name)

        def wrapped(group, *args, **kwargs):
            note(group, args)
            return original(group, *args, **kwargs)

        setattr(dist.ProcessGroup, name, wrapped)

    def _message(self, group, kind: str, args) -> None:
        tensor, peer = args[0][0], int(args[1])
        ranks = sorted(c10d._world.pg_group_ranks[group])
        entry = [kind, ranks[peer], tensor.numel() * tensor.element_size(), str(tensor.dtype).removeprefix("torch.")]
        self.messages.setdefault(_key(ranks), []).append(entry)

    def _scattered(self, group, args) -> None:
        inputs = args[1]
        while isinstance(inputs, list) and isinstance(inputs[0], list):
            inputs = inputs[0]
        inputs = inputs if isinstance(inputs, list) else [inputs]
        ranks = sorted(c10d._world.pg_group_ranks[group])
        size = sum(t.numel() * t.element_size() for t in inputs)
        self.reduce_scatters.setdefault(_key(ranks), []).append(size)

    def take(self) -> tuple[dict, dict]:
        taken = self.messages, self.reduce_scatters
        self.messages, self.reduce_scatters = {}, {}
        return taken


def _key(ranks) -> str:
    return ",".join(map(str, ranks))


def flight_recorder() -> list[dict]:
    return json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, False)).get("entries", [])


def _entry_bytes(sizes: list, dtypes: list) -> int:
    total = 0
    for shape, dtype in zip(sizes, dtypes):
        n = getattr(torch, DTYPES[dtype]).itemsize
        for side in shape:
            n *= side
        total += n
    return total


def collective(entry: dict, size: int) -> list:
    kind = entry["profiling_name"].removeprefix("gloo:")
    sent = _entry_bytes(entry["input_sizes"], entry["input_dtypes"])
    got = _entry_bytes(entry["output_sizes"], entry["output_dtypes"])
    total = max(sent, got)
    if kind in ("gather", "all_gather"):  # of a coalesced all-gather only the first output is listed
        total = max(got, sent * size)
    if kind == "scatter" and not sent:
        total = got * size
    dtypes = entry["input_dtypes"] or entry["output_dtypes"]
    return [kind, total, DTYPES[dtypes[0]] if dtypes else ""]


@contextlib.contextmanager
def file_store(path: Path, rank: int, world: int):
    """Rendezvous through a file: ports may be taken at any time by gloo's own connections."""
    original = dist.init_process_group
    dist.init_process_group = lambda backend=None, *a, **k: original(
        backend, store=dist.FileStore(str(path), world), rank=rank, world_size=world
    )
    try:
        yield
    finally:
        dist.init_process_group = original


def run_real(cases: list[dict], rank: int, out: Path) -> None:
    python = PythonEntries()
    seen = 0
    for case in cases:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case["world"]), LOCAL_WORLD_SIZE=str(case["world"]),
        )  # fmt: skip
        with file_store(out / f"{case['name']}.store", rank, case["world"]):
            script(case)
        groups = {name: sorted(c10d._world.pg_group_ranks[pg]) for pg, name in c10d._world.pg_names.items()}
        dist.barrier()
        entries = flight_recorder()
        collectives: dict[str, list] = {}
        for entry in entries[seen:-1]:  # without our own barrier
            ranks = groups[entry["process_group"][0]]
            collectives.setdefault(_key(ranks), []).append(collective(entry, len(ranks)))
        seen = len(entries)
        messages, scatters = python.take()
        write(out, case, rank, dict(collectives=collectives, messages=messages, reduce_scatters=scatters))
        forget_frameworks()
        dist.destroy_process_group()


# ---- the virtual side ----


def virtual_rank_on_real_tensors(case: dict, rank: int, payloads: Path) -> Any:
    """Runner: one virtual rank over real CPU tensors. Returns the Recorder."""
    from echo_hooks.graph.recorder import Recorder
    from echo_hooks.world import PayloadStore, RealValues, VirtualWorld, environment

    recorder = Recorder(rank, case["world"])
    world = VirtualWorld(
        recorder, RealValues(), nproc_per_node=case["world"], payloads=PayloadStore(payloads), check_devices=False
    )
    os.environ.update(environment(rank, case["world"], case["world"], "127.0.0.1", 29500))
    world.install()
    try:
        script(case)
    finally:
        world.remove()
    world.payloads.save()
    assert not world.findings, world.findings
    return recorder


def run_virtual(cases: list[dict], out: Path, runner: Callable[[dict, int, Path], Any]) -> None:
    """Every rank in a fork of its own: torch and the frameworks keep state per process, as a real job does."""
    for case in cases:
        with tempfile.TemporaryDirectory() as payloads:
            for rank in range(case["world"]):
                child = os.fork()
                if child == 0:
                    status = 1
                    try:
                        write(out, case, rank, recorded(runner(case, rank, Path(payloads))))
                        status = 0
                    except BaseException:
                        traceback.print_exc()
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(status)
                _, status = os.waitpid(child, 0)
                if status:
                    raise RuntimeError(f"virtual rank {rank} of {case['name']} failed")


def recorded(recorder) -> dict:
    """What the recorder holds, in the words of the flight recorder."""
    from echo_hooks.graph.program import Kind

    program = recorder.program.program()
    result: dict[str, dict] = dict(collectives={}, messages={}, reduce_scatters={})
    for i in range(len(program)):
        kind = program.kind[i]
        if kind not in (Kind.COLLECTIVE, Kind.SEND, Kind.RECV):
            continue
        key = _key(sorted(recorder.groups[program.group[i]].ranks))
        name = recorder.ops.signatures[program.op[i]].name
        size, dtype = int(program.bytes[i]), program.strings[program.dtype[i]]
        if kind != Kind.COLLECTIVE:
            result["messages"].setdefault(key, []).append([name, int(program.peer[i]), size, dtype])
            continue
        if name == "reduce_scatter":
            result["reduce_scatters"].setdefault(key, []).append(size)
            name = "all_reduce"
        result["collectives"].setdefault(key, []).append([name, size, dtype])
    return result


def write(out: Path, case: dict, rank: int, content: dict) -> None:
    (out / f"{case['name']}.{rank}.json").write_text(json.dumps(content))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=["real", "virtual"])
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--cases", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runner", default="oracle_run:virtual_rank_on_real_tensors")
    a = parser.parse_args()
    torch.set_num_threads(1)
    cases = json.loads(a.cases.read_text())
    if any(case.get("cuda_stand_ins") for case in cases):
        cuda_stand_ins.install()
    if a.side == "real":
        run_real(cases, a.rank, a.out)
    else:
        for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining"):
            importlib.import_module(name)  # once, before the forks
        if any(case["script"] == "train_mcore.py" for case in cases):
            importlib.import_module("megatron.core.models.gpt")
        module, function = a.runner.split(":")
        run_virtual(cases, a.out, getattr(importlib.import_module(module), function))


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a rank that fails must not wait for the others
