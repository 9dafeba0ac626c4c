"""A virtual rank for the tests, and tensors of a stand-in device."""

from __future__ import annotations

import torch

from echo_hooks.graph.program import Kind
from echo_hooks.graph.recorder import Recorder
from echo_hooks.world import PayloadStore, RealValues, VirtualWorld


class MetaValues(RealValues):
    """Meta tensors stand for tensors of a device: they hold no data, and may carry a known value."""

    def known(self, t):
        return getattr(t, "shadow", None) if t.is_meta else super().known(t)

    def set(self, t, value):
        if t.is_meta:
            t.shadow = None if value is None else value.reshape(t.shape).to(t.dtype)
        else:
            super().set(t, value)

    def pretended(self, t):
        return t.is_meta


class Run:
    """One virtual rank, with what it has recorded in readable form."""

    def __init__(self, rank: int, world_size: int, payloads: PayloadStore, values=None, **options):
        self.recorder = Recorder(rank, world_size)
        self.payloads = payloads
        self.world = VirtualWorld(
            self.recorder, values or MetaValues(), nproc_per_node=world_size, payloads=payloads, **options
        )

    def __enter__(self):
        self.world.install()
        return self

    def __exit__(self, *_):
        self.world.remove()

    def records(self) -> list[dict]:
        program = self.recorder.program.program()
        rows = [{name: column[i].item() for name, column in program.columns.items()} for i in range(len(program))]
        for row in rows:
            row["kind"] = Kind(row["kind"]).name.lower()
            row["dtype"] = program.strings[row["dtype"]]
            row["op"] = self.recorder.ops.signatures[row["op"]] if row["op"] >= 0 else None
            row["stream"] = "host" if row["stream"] < 0 else program.streams[row["stream"]]
        return rows

    def calls(self) -> list[tuple]:
        """(name, group index, bytes, dtype, peer) of every communication."""
        return [
            (r["op"].name, r["group"], r["bytes"], r["dtype"], r["peer"])
            for r in self.records()
            if r["kind"] in ("collective", "send", "recv")
        ]

    def steps(self) -> list[tuple[str, str]]:
        """(what, stream) of every record, in order."""
        return [(r["op"].name if r["op"] else r["kind"], r["stream"]) for r in self.records()]

    def assumed(self) -> dict[str, str]:
        return {a.kind: a.value for a in self.recorder.assumptions.values()}


def device(*shape, dtype=torch.float32, value=None) -> torch.Tensor:
    """A tensor of the stand-in device, with a known value or without."""
    if value is not None:
        value = torch.as_tensor(value, dtype=dtype)
        shape = value.shape
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    tensor.shadow = value
    return tensor
