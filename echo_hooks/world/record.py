"""Writing one communication into the program: its signature, its bytes, the stream it runs on.

`bytes` follows nccl-tests (doc/PERFORMANCE.md): the total buffer, that is the larger of what one rank sends and
receives; for gather and scatter the root's buffer, on every member.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from echo_hooks.graph.ops import OpSignature, TensorMeta, meta_of
from echo_hooks.graph.program import Kind
from echo_hooks.world.streams import Completion, Place

if TYPE_CHECKING:
    from echo_hooks.world.group import RecordingGroup
    from echo_hooks.world.virtual_world import VirtualWorld

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Call:
    """One collective as it is recorded. ``root``: group rank, -1: none. ``attrs``: see OpSignature."""

    name: str
    inputs: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta, ...]
    bytes: int
    dtype: str
    root: int = -1
    attrs: tuple[tuple[str, Any], ...] = ()


def issue(
    world: VirtualWorld, group: RecordingGroup, call: Call, device: torch.device, *, asynchronous: bool
) -> tuple[int, Completion]:
    """Record one collective; returns its running number on the group and how to wait for it."""
    recorder = world.recorder
    place = Place.collective(recorder, group, device, asynchronous)
    place.begin()
    seq = recorder.next_seq(group.entry.index)
    group.issued = seq + 1
    recorder.communication(
        Kind.COLLECTIVE,
        OpSignature(call.name, call.inputs, call.outputs, attrs=call.attrs),
        group=group.entry.index,
        bytes=call.bytes,
        dtype=call.dtype,
        seq=seq,
        peer=group.ranks[call.root] if call.root >= 0 else -1,
        stream=place.stream,
    )
    return seq, place.end(blocks_host=call.name == "barrier")


@dataclass(frozen=True)
class Message:
    """One send or recv. ``kind``: Kind.SEND or Kind.RECV; ``peer``: global rank of the other end."""

    kind: Kind
    content: TensorMeta
    bytes: int
    peer: int
    tag: int = 0


def issue_message(world: VirtualWorld, group: RecordingGroup, message: Message, device: torch.device) -> Completion:
    """Record one send or recv; returns how to wait for it."""
    recorder = world.recorder
    sending = message.kind == Kind.SEND
    ends = (world.rank, message.peer) if sending else (message.peer, world.rank)
    place = Place.point_to_point(recorder, group, device, *ends)
    place.begin()
    content = (message.content,)
    recorder.communication(
        message.kind,
        OpSignature("send", inputs=content) if sending else OpSignature("recv", outputs=content),
        group=group.entry.index,
        bytes=message.bytes,
        dtype=message.content.dtype,
        peer=message.peer,
        tag=message.tag,
        stream=place.stream,
    )
    return place.end()


def slots(tensors: Tensors) -> tuple[TensorMeta, ...]:
    """Metas of a list with one tensor per member: equal ones become one meta with the members in front."""
    metas = tuple(meta_of(t) for t in tensors)
    if len(metas) > 1 and len(set(metas)) == 1:
        return (TensorMeta((len(metas), *metas[0].shape), metas[0].dtype, metas[0].contiguous),)
    return metas


def nbytes(tensors: Tensors) -> int:
    """Bytes of all elements of all tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def attributes(reduce: str = "", count: int = 1, **more: Any) -> tuple[tuple[str, Any], ...]:
    """Attributes of a call (see OpSignature), without those that say nothing."""
    attrs: list[tuple[str, Any]] = []
    if reduce:
        attrs.append(("reduce", reduce))
    if count > 1:
        attrs.append(("count", count))
    attrs.extend((k, v) for k, v in more.items() if v is not None)
    return tuple(attrs)


def split_elements(tensors: Tensors, splits: Sequence[int] | None, size: int) -> tuple[int, ...]:
    """Elements for each of the ``size`` members: of one flat tensor (``splits`` in rows, none: even), or one each."""
    if len(tensors) > 1:
        return tuple(t.numel() for t in tensors)
    if splits:
        row = tensors[0].numel() // max(1, tensors[0].shape[0]) if tensors[0].dim() else 1
        return tuple(int(n) * row for n in splits)
    return (tensors[0].numel() // size,) * size
