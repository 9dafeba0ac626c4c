"""Run example scripts as real gloo processes, or as virtual ranks, and write down what each rank communicated.

    python oracle_run.py real --world 2 --rank 0 --cases FILE --out DIR
    python oracle_run.py virtual --cases FILE --out DIR [--runner module:function]

The truth of the real side is C++'s own: the flight recorder inside ProcessGroupGloo (TORCH_FR_BUFFER_SIZE), which no
Python hook can miss or disturb. It leaves out send and recv and shows a reduce-scatter as the all-reduce by which gloo
makes it, so those three are logged where Python enters the process group.

A case: {"name", "world", "script", "argv"}. Output: one JSON file per (case, rank):
{"collectives": {group ranks: [[kind, bytes, dtype], ...]}, "messages": {...: [[kind, peer, bytes, dtype], ...]}}.
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
SCRIPTS = Path(__file__).resolve().parent / "scripts"

DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
          "Int": "int32", "Byte": "uint8", "Bool": "bool", "Char": "int8", "Short": "int16"}  # fmt: skip


def script(case: dict) -> None:
    """The example as ``__main__``, left with its process group alive."""
    path = next(d / case["script"] for d in (EXAMPLES, SCRIPTS) if (d / case["script"]).exists())
    saved = sys.argv, sys.path[0], dist.destroy_process_group
    sys.argv, sys.path[0] = [str(path), *case["argv"]], str(path.parent)
    dist.destroy_process_group = lambda *a, **k: None
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv, sys.path[0], dist.destroy_process_group = saved


def in_a_fork(work: Callable[[], None], what: str) -> None:
    """Run ``work`` in a process of its own: torch and the frameworks keep state, and a job would be a new process."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"{what} failed")


# ---- the real side ----


class PythonEntries:
    """Sends, receives and reduce-scatters, noted where Python calls the process group or the functional op.

    ``spans``: for each reduce-scatter the flight recorder's entries [first, last) that gloo made for it.
    """

    MESSAGES = {"send": "send", "recv": "recv", "recv_anysource": "recv"}
    SCATTERS = ("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "reduce_scatter_single",
                "reduce_scatter_single_coalesced")  # fmt: skip

    def __init__(self) -> None:
        self.messages: dict[str, list] = {}
        self.spans: list[tuple[int, int, str, list]] = []
        for name, kind in self.MESSAGES.items():
            self._wrap_message(name, kind)
        for name in self.SCATTERS:
            if hasattr(dist.ProcessGroup, name):
                original = getattr(dist.ProcessGroup, name)
                setattr(dist.ProcessGroup, name, self._scatter(original, lambda args: (args[0], args[2])))
        functional = torch.ops._c10d_functional
        for name in ("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"):
            original = getattr(functional, name)
            setattr(functional, name, self._scatter(original, lambda a: (c10d._resolve_process_group(a[-1]), a[0])))

    def _wrap_message(self, name: str, kind: str) -> None:
        original = getattr(dist.ProcessGroup, name)

        def wrapped(group, tensors, peer, *args, **kwargs):
            ranks = sorted(c10d._world.pg_group_ranks[group])
            entry = [kind, ranks[int(peer)], _bytes(tensors), _dtype(tensors)]
            self.messages.setdefault(_key(ranks), []).append(entry)
            return original(group, tensors, peer, *args, **kwargs)

        setattr(dist.ProcessGroup, name, wrapped)

    def _scatter(self, original: Callable, group_and_inputs: Callable) -> Callable:
        def wrapped(*args, **kwargs):
            group, inputs = group_and_inputs(args)
            first = len(flight_recorder())
            result = original(*args, **kwargs)
            key = _key(sorted(c10d._world.pg_group_ranks[group]))
            call = ["reduce_scatter", _bytes(inputs), _dtype(inputs)]
            self.spans.append((first, len(flight_recorder()), key, call))
            return result

        return wrapped

    def collectives(self, entries: list[dict], groups: dict[str, list[int]]) -> dict[str, list]:
        """By group, in order, with one reduce_scatter in place of the all-reduces that gloo makes of it."""
        result: dict[str, list] = {}
        spans = {first: (last, key, call) for first, last, key, call in self.spans}
        i = 0
        while i < len(entries):
            if i in spans:
                i, key, call = spans[i]
                result.setdefault(key, []).append(call)
                continue
            ranks = groups[entries[i]["process_group"][0]]
            result.setdefault(_key(ranks), []).append(collective(entries[i], len(ranks)))
            i += 1
        return result


def _tensors(nested) -> list[torch.Tensor]:
    return [nested] if isinstance(nested, torch.Tensor) else [t for item in nested for t in _tensors(item)]


def _bytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in _tensors(tensors))


def _dtype(tensors) -> str:
    return str(_tensors(tensors)[0].dtype).removeprefix("torch.")


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


def real_rank(case: dict, rank: int, out: Path) -> None:
    world = case["world"]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # read by DeepSpeed, not used
    python = PythonEntries()
    with file_store(out / f"{case['name']}.store", rank, world):
        script(case)
    groups = {name: sorted(c10d._world.pg_group_ranks[pg]) for pg, name in c10d._world.pg_names.items()}
    dist.barrier()
    entries = flight_recorder()[:-1]  # without our own barrier
    content = dict(collectives=python.collectives(entries, groups), messages=python.messages)
    write(out, case, rank, content)
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


def virtual_ranks(case: dict, out: Path, runner: Callable[[dict, int, Path], Any]) -> None:
    with tempfile.TemporaryDirectory() as payloads:
        for rank in range(case["world"]):
            in_a_fork(
                lambda rank=rank: write(out, case, rank, recorded(runner(case, rank, Path(payloads)))),
                f"virtual rank {rank} of {case['name']}",
            )


def recorded(recorder) -> dict:
    """What the recorder holds, in the words of the flight recorder."""
    from echo_hooks.graph.program import Kind

    program = recorder.program.program()
    result: dict[str, dict] = dict(collectives={}, messages={})
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
    preload(cases)
    module, function = a.runner.split(":")
    for case in cases:
        if a.side == "real":
            in_a_fork(lambda case=case: real_rank(case, a.rank, a.out), f"real rank {a.rank} of {case['name']}")
        else:
            virtual_ranks(case, a.out, getattr(importlib.import_module(module), function))


def preload(cases: list[dict]) -> None:
    """Import once, before the forks, what most cases need."""
    names = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining"]
    if any(case["cuda_stand_ins"] for case in cases):
        cuda_stand_ins.install()
        names.append("megatron.core.models.gpt")
    if any("deepspeed" in case["script"] for case in cases):
        names.append("torch._inductor.compile_fx")  # imported from within DeepSpeed it fails on torch 2.13
    for name in names:
        importlib.import_module(name)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a rank that fails must not wait for the others
