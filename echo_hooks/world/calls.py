"""The communication calls: each is recorded, then answered with values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from echo_hooks.graph.ops import dtype_name, meta_of
from echo_hooks.graph.program import Kind
from echo_hooks.world import filling
from echo_hooks.world.exchange import contributions, from_root, keep, make_up, message_key, replayed, set_fitting
from echo_hooks.world.payloads import PAYLOAD_MAX_BYTES, Payload, tensor_bytes
from echo_hooks.world.record import (
    Call,
    Message,
    Tensors,
    attributes,
    issue,
    issue_message,
    nbytes,
    slots,
    split_elements,
)
from echo_hooks.world.streams import Completion
from echo_hooks.world.values import is_control, reduce_values
from echo_hooks.world.work import RecordedWork

if TYPE_CHECKING:
    from echo_hooks.world.group import RecordingGroup
    from echo_hooks.world.virtual_world import VirtualWorld


# ---- collectives ----


def all_reduce(
    world: VirtualWorld, group: RecordingGroup, inputs: Tensors, outputs: Tensors, reduce: str, asynchronous: bool
) -> RecordedWork:
    """In place when ``inputs`` are ``outputs``."""
    attrs = attributes(reduce, len(inputs))
    metas = tuple(map(meta_of, inputs)), tuple(map(meta_of, outputs))
    call = Call("all_reduce", *metas, nbytes(inputs), _dtype(inputs), attrs=attrs)
    seq, completion = issue(world, group, call, inputs[0].device, asynchronous=asynchronous)
    for part, (own, out) in enumerate(zip(inputs, outputs)):
        _set_reduced(world, group, seq, part, "all_reduce", own, out, reduce)
    return _finish(world, completion, outputs)


def reduce(world: VirtualWorld, group: RecordingGroup, tensors: Tensors, root: int, op: str, asynchronous: bool):
    """Only the root's tensor changes."""
    metas = tuple(map(meta_of, tensors))
    call = Call("reduce", metas, metas, nbytes(tensors), _dtype(tensors), root, attributes(op))
    seq, completion = issue(world, group, call, tensors[0].device, asynchronous=asynchronous)
    if group.rank() == root:
        _set_reduced(world, group, seq, 0, "reduce", tensors[0], tensors[0], op)
    else:
        contributions(world, group, seq, 0, "reduce", tensors[0])
    return _finish(world, completion, tensors)


def _set_reduced(world, group, seq: int, part: int, name: str, own: torch.Tensor, out: torch.Tensor, op: str) -> None:
    peers = contributions(world, group, seq, part, name, own)
    if world.values.in_place and not peers:
        filling.reduced(own, out, op, group.size())
        return
    value = world.values.known(own)
    if value is not None:
        shaped = {i: p.reshape(value.shape) for i, p in peers.items()}
        value = reduce_values(op, value, group.size(), shaped)
    world.values.set(out, value)


def broadcast(
    world: VirtualWorld, group: RecordingGroup, own: torch.Tensor, out: torch.Tensor, root: int, asynchronous: bool
) -> RecordedWork:
    """The root's payload where it is known, else what this rank holds."""
    call = Call("broadcast", (meta_of(own),), (meta_of(out),), nbytes([own]), dtype_name(own.dtype), root)
    seq, completion = issue(world, group, call, own.device, asynchronous=asynchronous)
    value = from_root(world, group, seq, "broadcast", own, root)
    if value is not None:
        world.values.set(out, value)
    elif out is not own:
        world.values.set(out, world.values.known(own))
    return _finish(world, completion, [out])


def all_gather(
    world: VirtualWorld,
    group: RecordingGroup,
    inputs: Tensors,
    outputs: Sequence[torch.Tensor | Tensors],
    asynchronous: bool,
) -> RecordedWork:
    """``outputs[i]``: one tensor holding all members' ``inputs[i]`` one after the other, or a list with one each."""
    flat = [t for out in outputs for t in _listed(out)]
    metas = tuple(m for out in outputs for m in slots(_listed(out)))
    total = max(nbytes(flat), nbytes(inputs))
    attrs = attributes("", len(inputs))
    call = Call("all_gather", tuple(map(meta_of, inputs)), metas, total, _dtype(inputs), attrs=attrs)
    seq, completion = issue(world, group, call, inputs[0].device, asynchronous=asynchronous)
    for part, (own, out) in enumerate(zip(inputs, outputs)):
        single = isinstance(out, torch.Tensor)
        peers = contributions(world, group, seq, part, "all_gather", own, equal=single)
        value = world.values.known(own)
        if isinstance(out, torch.Tensor):
            if world.values.in_place and not peers:
                filling.gathered(own, out, group.size())
            else:
                world.values.set(out, _joined(peers, value, group.size()))
        else:
            for i, slot in enumerate(out):
                set_fitting(world, slot, peers.get(i, value))
    return _finish(world, completion, flat)


def reduce_scatter(
    world: VirtualWorld,
    group: RecordingGroup,
    inputs: Sequence[torch.Tensor | Tensors],
    outputs: Tensors,
    reduce: str,
    asynchronous: bool,
) -> RecordedWork:
    """``inputs[i]``: one tensor with a chunk per member, or a list with one tensor each."""
    flat = [t for source in inputs for t in _listed(source)]
    metas = tuple(m for source in inputs for m in slots(_listed(source)))
    total = max(nbytes(flat), nbytes(outputs))
    attrs = attributes(reduce, len(outputs))
    call = Call("reduce_scatter", metas, tuple(map(meta_of, outputs)), total, _dtype(flat), attrs=attrs)
    seq, completion = issue(world, group, call, outputs[0].device, asynchronous=asynchronous)
    me = group.rank()
    for part, (source, out) in enumerate(zip(inputs, outputs)):
        if not isinstance(source, torch.Tensor):
            # Each member sends me another tensor: the store, which keeps one per call, cannot replay them.
            value = world.values.known(source[me])
            if world.values.in_place:
                filling.reduced(source[me], out, reduce, group.size())
                continue
            world.values.set(out, None if value is None else reduce_values(reduce, value, group.size(), {}))
            continue
        peers = contributions(world, group, seq, part, "reduce_scatter", source)
        if world.values.in_place and not peers:
            filling.reduced(_chunk(source.detach(), me, group.size()), out, reduce, group.size())
            continue
        value = world.values.known(source)
        if value is not None:
            chunks = {i: _chunk(p, me, group.size()) for i, p in peers.items()}
            value = reduce_values(reduce, _chunk(value, me, group.size()), group.size(), chunks)
        world.values.set(out, value)
    return _finish(world, completion, outputs)


def all_to_all(
    world: VirtualWorld,
    group: RecordingGroup,
    inputs: Tensors,
    outputs: Tensors,
    input_splits: Sequence[int] | None,
    output_splits: Sequence[int] | None,
    asynchronous: bool,
) -> RecordedWork:
    """One flat tensor each (splits in rows of dimension 0, None: even), or one tensor per member."""
    sent = split_elements(inputs, input_splits, group.size())
    received = split_elements(outputs, output_splits, group.size())
    even = len(set(sent)) <= 1 and len(set(received)) <= 1
    attrs = () if even else attributes(input_splits=sent, output_splits=received)
    dtype = _dtype(outputs if outputs else inputs)
    call = Call("all_to_all", slots(inputs), slots(outputs), max(nbytes(inputs), nbytes(outputs)), dtype, -1, attrs)
    seq, completion = issue(world, group, call, outputs[0].device, asynchronous=asynchronous)
    if len(inputs) > 1 or len(outputs) > 1:
        for own, out in zip(inputs, outputs):
            value = world.values.known(own)
            set_fitting(world, out, value)
        return _finish(world, completion, outputs)
    own, out = inputs[0], outputs[0]
    peers = contributions(world, group, seq, 0, "all_to_all", own, equal=even)
    value = world.values.known(own)
    if value is not None and even and len(peers) == group.size() - 1:
        me, size = group.rank(), group.size()
        chunks = [_chunk(peers.get(i, value), me, size) for i in range(size)]
        world.values.set(out, torch.cat(chunks))
    else:
        set_fitting(world, out, value)
    return _finish(world, completion, outputs)


def gather(
    world: VirtualWorld, group: RecordingGroup, own: torch.Tensor, outputs: Tensors, root: int, asynchronous: bool
) -> RecordedWork:
    """``outputs``: on the root one tensor per member (or one with all of them), elsewhere empty."""
    total = nbytes([own]) * group.size()
    call = Call("gather", (meta_of(own),), slots(outputs), total, dtype_name(own.dtype), root)
    seq, completion = issue(world, group, call, own.device, asynchronous=asynchronous)
    peers = contributions(world, group, seq, 0, "gather", own)
    value = world.values.known(own)
    if len(outputs) == 1 < group.size():
        if world.values.in_place and not peers:
            filling.gathered(own, outputs[0], group.size())
        else:
            world.values.set(outputs[0], _joined(peers, value, group.size()))
    else:
        for i, slot in enumerate(outputs):
            world.values.set(slot, peers.get(i, value))
    return _finish(world, completion, outputs or [own])


def scatter(
    world: VirtualWorld, group: RecordingGroup, out: torch.Tensor, inputs: Tensors, root: int, asynchronous: bool
) -> RecordedWork:
    """``inputs``: on the root one tensor per member, elsewhere empty (and then the answer is made up)."""
    total = nbytes([out]) * group.size()
    call = Call("scatter", slots(inputs), (meta_of(out),), total, dtype_name(out.dtype), root)
    seq, completion = issue(world, group, call, out.device, asynchronous=asynchronous)
    key = f"collective/{group.entry.index}/{seq}"
    if inputs:
        for i, chunk in enumerate(inputs):
            if total <= PAYLOAD_MAX_BYTES:
                keep(world, group, seq, i, "scatter", chunk)
        world.values.set(out, world.values.known(inputs[group.rank()]))
        return _finish(world, completion, [out])
    rank = group.ranks[root]
    mine = Payload("scatter", nbytes([out]), dtype_name(out.dtype))
    value = replayed(world, group, f"{key}/{group.rank()}", f"call {seq}", rank, mine, out)
    if value is not None:
        world.values.set(out, value)
    else:
        make_up(world, out, "scatter", rank)
    return _finish(world, completion, [out])


def barrier(world: VirtualWorld, group: RecordingGroup, device: torch.device, asynchronous: bool) -> RecordedWork:
    """NCCL's barrier is an all-reduce of one float32 whose wait blocks the host (ProcessGroupNCCL.cpp, barrier)."""
    on_host = group.runs_on_host(device)
    call = Call("barrier", (), (), 0 if on_host else 4, "" if on_host else "float32")
    _, completion = issue(world, group, call, device, asynchronous=asynchronous)
    return _finish(world, completion, [])


# ---- point to point ----


def send(world: VirtualWorld, group: RecordingGroup, own: torch.Tensor, peer: int, tag: int) -> RecordedWork:
    """``peer``: group rank."""
    destination = group.ranks[peer]
    completion = issue_message(
        world, group, Message(Kind.SEND, meta_of(own), nbytes([own]), destination, tag), own.device
    )
    key = message_key(world, group, world.rank, destination, tag, own.device)
    size = nbytes([own])
    value = world.values.known(own) if size <= PAYLOAD_MAX_BYTES else None
    data = None if value is None else tensor_bytes(value)
    world.payloads.put(world.rank, key, Payload("send", size, dtype_name(own.dtype), data))
    if value is not None and own.numel() == 1 and is_control(own.dtype):
        world.last_sent[group.entry.index, destination] = int(value.reshape(()).item())
    return _finish(world, completion, [own])


def recv(world: VirtualWorld, group: RecordingGroup, out: torch.Tensor, peer: int, tag: int) -> RecordedWork:
    """``peer``: group rank, -1: any (the next member is taken, and counted)."""
    if peer < 0:
        peer = (group.rank() + 1) % group.size()
        world.recorder.assume("source of a receive from anyone", f"group rank {peer}")
    source = group.ranks[peer]
    completion = issue_message(world, group, Message(Kind.RECV, meta_of(out), nbytes([out]), source, tag), out.device)
    key = message_key(world, group, source, world.rank, tag, out.device)
    mine = Payload("send", nbytes([out]), dtype_name(out.dtype))
    value = replayed(world, group, key, f"message {key.rsplit('/', 1)[1]}", source, mine, out)
    if value is not None:
        world.values.set(out, value)
    else:
        echo = None
        if out.numel() == 1 and out.dtype in (torch.int32, torch.int64):
            echo = world.last_sent.get((group.entry.index, source))
        make_up(world, out, "recv", source, echo)
    return RecordedWork(world.recorder, [out], completion, peer)


def _finish(world: VirtualWorld, completion: Completion, outputs: Tensors) -> RecordedWork:
    return RecordedWork(world.recorder, list(outputs), completion)


def _dtype(tensors: Tensors) -> str:
    return dtype_name(tensors[0].dtype)


def _listed(t: torch.Tensor | Tensors) -> list[torch.Tensor]:
    return [t] if isinstance(t, torch.Tensor) else list(t)


def _chunk(flat: torch.Tensor, index: int, size: int) -> torch.Tensor:
    length = flat.numel() // size
    return flat.reshape(-1)[index * length : (index + 1) * length]


def _joined(peers: dict[int, torch.Tensor], own: torch.Tensor | None, size: int) -> torch.Tensor | None:
    """All members' values one after the other; None when own is unknown (then a peer's may be missing too)."""
    if own is None:
        return None
    return torch.cat([peers.get(i, own).reshape(-1) for i in range(size)])
