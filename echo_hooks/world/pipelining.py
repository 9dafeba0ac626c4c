"""torch.distributed.pipelining: the exchange of shapes between stages before the first step.

Stages that were not told their shapes send them down the pipeline as objects (forward), then gradients' shapes back
up (backward). Forward shapes come from the stage before, when its rank has been traced; failing that this rank's own
earlier outputs are mirrored (equal stages), and counted. Backward shapes follow from the stage's own outputs, as torch
derives them itself for stages with static shapes.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from echo_hooks.errors import ScriptError
from echo_hooks.graph.ops import dtype_name

if TYPE_CHECKING:
    from echo_hooks.world.virtual_world import VirtualWorld


def encode(obj: Any) -> Any:
    """Shapes as plain JSON; anything else is returned as it is."""
    if type(obj) is tuple and obj and all(isinstance(t, torch.Tensor) and t.is_meta for t in obj):
        return {"echo": "meta tensors", "metas": [_meta(t.shape, t.stride(), t.dtype, t.requires_grad) for t in obj]}
    kind = type(obj).__name__
    if kind in ("_StageForwardMeta", "_StageBackwardMeta"):
        metas = obj.forward_metas if kind == "_StageForwardMeta" else obj.backward_metas
        if all(m is None or type(m).__name__ == "_TensorMeta" for m in metas):
            encoded = [None if m is None else _meta(m.shape, m.stride, m.dtype, m.requires_grad) for m in metas]
            return {"echo": kind, "metas": encoded}
    return obj


def decode(obj: Any) -> Any:
    """The reverse of ``encode``."""
    if not isinstance(obj, dict) or "echo" not in obj:
        return obj
    if obj["echo"] == "meta tensors":
        return tuple(
            torch.empty_strided(m["shape"], m["stride"], dtype=_dtype(m["dtype"]), device="meta").requires_grad_(
                m["requires_grad"]
            )
            for m in obj["metas"]
        )
    from torch.distributed.pipelining import _utils

    metas = tuple(
        None
        if m is None
        else _utils._TensorMeta(
            shape=torch.Size(m["shape"]),
            stride=tuple(m["stride"]),
            dtype=_dtype(m["dtype"]),
            requires_grad=m["requires_grad"],
        )
        for m in obj["metas"]
    )
    return getattr(_utils, obj["echo"])(metas)


def _meta(shape, stride, dtype: torch.dtype, requires_grad: bool) -> dict[str, Any]:
    return {
        "shape": [int(n) for n in shape],
        "stride": [int(n) for n in stride],
        "dtype": dtype_name(dtype),
        "requires_grad": bool(requires_grad),
    }


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype


def greetings(original: Any) -> Any:
    """The numbers that neighbouring stages send each other to open their communicators, received as they are sent.

    torch 2.9 receives the 8 bytes of an int64 into a float32 (torch/distributed/pipelining/stage.py). NCCL moves both
    in one slot and does not notice, so it is no reason to call the user's plan broken.
    """

    def operations(stage):
        found = original(stage)
        sent = next((op.tensor for op in found if op.op is dist.isend), None)
        for op in found:
            if sent is not None and op.op is dist.irecv and op.tensor.dtype != sent.dtype:
                op.tensor = op.tensor.to(sent.dtype)
        return found

    return operations


def of_microbatch(world: VirtualWorld, original: Any) -> Any:
    """One chunk's forward or backward pass; its number is the first argument after the stage."""

    @functools.wraps(original)
    def one_chunk(stage, number, *args, **kwargs):
        with world.recorder.labelled(int(number)):
            return original(stage, number, *args, **kwargs)

    return one_chunk


class ShapeExchange:
    """What this rank has sent, for stages whose neighbour is unknown."""

    def __init__(self, world: VirtualWorld):
        self.world = world
        self.forward: Any = None  # the last forward shapes this rank sent

    @contextmanager
    def _answering(self, fallback):
        self.world.objects_fallback = fallback
        try:
            yield
        finally:
            self.world.objects_fallback = None

    def _mirrored(self, stage: Any, source_stage: int) -> Any:
        if self.forward is None:
            rank = self.world.rank
            raise ScriptError(
                f"Rank {rank} runs pipeline stage {stage.stage_index}, whose input shapes come from stage "
                f"{source_stage} on a rank that was not traced before; trace the stages in order, or pass input_args "
                "and output_args to PipelineStage.",
                rank=rank,
            )
        return self.forward

    # ---- torch 2.13 on: _recv_meta and _send_meta ----

    def recv_meta(self, original):
        def recv(stage, src_stage):
            def fallback(own: list) -> list:
                if src_stage < stage.stage_index:
                    return [self._mirrored(stage, src_stage)]
                from torch.distributed.pipelining import _utils

                return [_utils._StageBackwardMeta(_utils._derive_grad_metas(stage._stage_meta.outputs))]

            with self._answering(fallback):
                return original(stage, src_stage)

        return recv

    def send_meta(self, original):
        def send(stage, meta, dst_stage):
            if dst_stage > stage.stage_index:
                self.forward = meta
            return original(stage, meta, dst_stage)

        return send

    # ---- up to torch 2.12: both inside _shape_inference ----

    def shape_inference(self, original):
        def infer(stage, args, kwargs=None):
            with self._answering(lambda own: [self._mirrored(stage, stage.stage_index - 1)]):
                outputs = original(stage, args, kwargs)
            self.forward = tuple(stage.get_outputs_meta())
            return outputs

        return infer
