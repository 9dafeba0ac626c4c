"""One communication call: recorded on its stream, and answered with values.

`bytes` follows nccl-tests (doc/PERFORMANCE.md): the total buffer, that is the larger of what one rank sends and
receives; for gather and scatter the root's buffer, on every member.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from echo_hooks import host_tensors
from echo_hooks.graph.ops import OpSignature, TensorMeta
from echo_hooks.graph.problems import Problem
from echo_hooks.graph.program import Kind
from echo_hooks.world.payloads import PAYLOAD_MAX_BYTES, Payload, bytes_tensor, tensor_bytes
from echo_hooks.world.streams import Completion, Place
from echo_hooks.world.values import RECEIVED_STD, dtype_name, is_control, policy_value, reduce_values
from echo_hooks.world.work import RecordedWork

if TYPE_CHECKING:
    from echo_hooks.world.group import RecordingGroup
    from echo_hooks.world.virtual_world import VirtualWorld

Tensors = Sequence[torch.Tensor]


# ---- recording ----


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


def meta(t: torch.Tensor) -> TensorMeta:
    return TensorMeta(tuple(int(n) for n in t.shape), dtype_name(t.dtype), t.is_contiguous())


def slots(tensors: Tensors) -> tuple[TensorMeta, ...]:
    """Metas of a list with one tensor per member: equal ones become one meta with the members in front."""
    metas = tuple(meta(t) for t in tensors)
    if len(metas) > 1 and len(set(metas)) == 1:
        return (TensorMeta((len(metas), *metas[0].shape), metas[0].dtype, metas[0].contiguous),)
    return metas


def nbytes(tensors: Tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


# ---- what the other members put in ----


def contributions(
    world: VirtualWorld, group: RecordingGroup, seq: int, part: int, name: str, own: torch.Tensor, *, equal: bool = True
) -> dict[int, torch.Tensor]:
    """Keep ``own`` for later ranks and return the known values of the peers, by group rank, each flat.

    ``part``: index of the tensor in a coalesced call. ``equal``: every member must bring the same number of bytes.
    """
    size = nbytes([own])
    if size > PAYLOAD_MAX_BYTES or group.size() == 1:
        return {}
    value = world.values.known(own)
    dtype = dtype_name(own.dtype)
    key = f"collective/{group.entry.index}/{seq}/{part}"
    mine = Payload(name, size, dtype, None if value is None else tensor_bytes(value))
    world.payloads.put(world.rank, key, mine)
    found = {}
    for rank in world.payloads.ranks():
        if rank == world.rank or rank not in group.members:
            continue
        theirs = world.payloads.get(rank, key)
        if theirs is None:
            continue
        if not agree(world, group, f"call {seq}", rank, theirs, mine, equal):
            continue
        if theirs.data is not None:
            found[group.members[rank]] = bytes_tensor(theirs.data, own.dtype)
    if value is not None and len(found) < group.size() - 1 and size:
        world.recorder.assume(f"peers' values in {name} of {dtype}", "as this rank's own")
    return found


def agree(
    world: VirtualWorld, group: RecordingGroup, what: str, rank: int, theirs: Payload, mine: Payload, equal: bool
) -> bool:
    """False, and a finding, when two ranks made different calls under one running number."""
    same_size = not equal or theirs.bytes == mine.bytes
    if theirs.kind == mine.kind and theirs.dtype == mine.dtype and same_size:
        return True
    site = world.recorder.site()
    message = (
        f"Ranks {rank} and {world.rank} disagree about {what} on group {group.entry.name!r}: rank {rank} made "
        f"{theirs.kind} of {theirs.bytes} bytes {theirs.dtype}, rank {world.rank} made {mine.kind} of "
        f"{mine.bytes} bytes {mine.dtype} ({site or 'unknown line'})."
    )
    problem = Problem("mismatch", message, tuple(sorted((rank, world.rank))), site)
    if problem not in world.findings:
        world.findings.append(problem)
        world.recorder.note(message)
    return False


# ---- collectives ----


def _attrs(reduce: str = "", count: int = 1, **more: Any) -> tuple[tuple[str, Any], ...]:
    attrs: list[tuple[str, Any]] = []
    if reduce:
        attrs.append(("reduce", reduce))
    if count > 1:
        attrs.append(("count", count))
    attrs.extend((k, v) for k, v in more.items() if v is not None)
    return tuple(attrs)


def _finish(world: VirtualWorld, completion: Completion, outputs: Tensors) -> RecordedWork:
    return RecordedWork(world.recorder, list(outputs), completion)


def all_reduce(
    world: VirtualWorld, group: RecordingGroup, inputs: Tensors, outputs: Tensors, reduce: str, asynchronous: bool
) -> RecordedWork:
    """In place when ``inputs`` are ``outputs``."""
    name = "all_reduce"
    call = Call(name, tuple(map(meta, inputs)), tuple(map(meta, outputs)), nbytes(inputs), _dtype(inputs))
    call = _with(call, reduce, len(inputs))
    seq, completion = issue(world, group, call, inputs[0].device, asynchronous=asynchronous)
    for part, (own, out) in enumerate(zip(inputs, outputs)):
        _set_reduced(world, group, seq, part, name, own, out, reduce)
    return _finish(world, completion, outputs)


def reduce(world: VirtualWorld, group: RecordingGroup, tensors: Tensors, root: int, op: str, asynchronous: bool):
    """Only the root's tensor changes."""
    metas = tuple(map(meta, tensors))
    call = Call("reduce", metas, metas, nbytes(tensors), _dtype(tensors), root, _attrs(op))
    seq, completion = issue(world, group, call, tensors[0].device, asynchronous=asynchronous)
    if group.rank() == root:
        _set_reduced(world, group, seq, 0, "reduce", tensors[0], tensors[0], op)
    else:
        contributions(world, group, seq, 0, "reduce", tensors[0])
    return _finish(world, completion, tensors)


def _set_reduced(world, group, seq: int, part: int, name: str, own: torch.Tensor, out: torch.Tensor, op: str) -> None:
    peers = contributions(world, group, seq, part, name, own)
    value = world.values.known(own)
    if value is not None:
        shaped = {i: p.reshape(value.shape) for i, p in peers.items()}
        value = reduce_values(op, value, group.size(), shaped)
    world.values.set(out, value)


def broadcast(
    world: VirtualWorld, group: RecordingGroup, own: torch.Tensor, out: torch.Tensor, root: int, asynchronous: bool
) -> RecordedWork:
    """The root's payload where it is known, else what this rank holds."""
    call = Call("broadcast", (meta(own),), (meta(out),), nbytes([own]), dtype_name(own.dtype), root)
    seq, completion = issue(world, group, call, own.device, asynchronous=asynchronous)
    value = _from_root(world, group, seq, "broadcast", own, root)
    if value is not None:
        world.values.set(out, value)
    elif out is not own:
        world.values.set(out, world.values.known(own))
    return _finish(world, completion, [out])


def _from_root(world, group, seq: int, name: str, own: torch.Tensor, root: int) -> torch.Tensor | None:
    """The root's payload on a member that has it from the store; None on the root itself or when unknown."""
    if group.rank() == root:
        contributions_of_root(world, group, seq, name, own)
        return None
    size, dtype = nbytes([own]), dtype_name(own.dtype)
    rank = group.ranks[root]
    theirs = world.payloads.get(rank, f"collective/{group.entry.index}/{seq}/0")
    if theirs is not None and agree(
        world, group, f"call {seq}", rank, theirs, Payload(name, size, dtype), equal=True
    ):
        if theirs.data is not None:
            return bytes_tensor(theirs.data, own.dtype)
    if size <= PAYLOAD_MAX_BYTES and size:
        world.recorder.assume(f"{name} of {dtype} from rank {rank}", "as this rank's own")
    return None


def contributions_of_root(world, group, seq: int, name: str, own: torch.Tensor) -> None:
    """Keep what the root sends, for members traced later."""
    size = nbytes([own])
    if size > PAYLOAD_MAX_BYTES or group.size() == 1:
        return
    value = world.values.known(own)
    data = None if value is None else tensor_bytes(value)
    key = f"collective/{group.entry.index}/{seq}/0"
    world.payloads.put(world.rank, key, Payload(name, size, dtype_name(own.dtype), data))


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
    call = Call("all_gather", tuple(map(meta, inputs)), metas, total, _dtype(inputs))
    call = _with(call, "", len(inputs))
    seq, completion = issue(world, group, call, inputs[0].device, asynchronous=asynchronous)
    for part, (own, out) in enumerate(zip(inputs, outputs)):
        listed = not isinstance(out, torch.Tensor)
        peers = contributions(world, group, seq, part, "all_gather", own, equal=not listed)
        value = world.values.known(own)
        me = group.rank()
        if listed:
            for i, slot in enumerate(_listed(out)):
                found = peers.get(i) if i != me else value
                _set_fitting(world, slot, value if found is None else found)
            continue
        parts = [value if i == me else peers.get(i, value) for i in range(group.size())]
        known = [p.reshape(-1) for p in parts if p is not None]
        world.values.set(out, torch.cat(known) if len(known) == group.size() else None)
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
    call = Call("reduce_scatter", metas, tuple(map(meta, outputs)), total, _dtype(flat))
    call = _with(call, reduce, len(outputs))
    seq, completion = issue(world, group, call, outputs[0].device, asynchronous=asynchronous)
    me = group.rank()
    for part, (source, out) in enumerate(zip(inputs, outputs)):
        if not isinstance(source, torch.Tensor):
            _set_reduced(world, group, seq, part, "reduce_scatter", source[me], out, reduce)
            continue
        peers = contributions(world, group, seq, part, "reduce_scatter", source)
        value = world.values.known(source)
        if value is None:
            world.values.set(out, None)
            continue
        chunks = {i: _chunk(p, me, group.size()) for i, p in peers.items()}
        world.values.set(out, reduce_values(reduce, _chunk(value.reshape(-1), me, group.size()), group.size(), chunks))
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
    attrs = _attrs(
        "",
        1,
        input_splits=_elements(inputs, input_splits),
        output_splits=_elements(outputs, output_splits),
    )
    dtype = _dtype(outputs if outputs else inputs)
    call = Call("all_to_all", slots(inputs), slots(outputs), max(nbytes(inputs), nbytes(outputs)), dtype, -1, attrs)
    seq, completion = issue(world, group, call, outputs[0].device, asynchronous=asynchronous)
    if len(inputs) > 1 or len(outputs) > 1:
        for own, out in zip(inputs, outputs):
            value = world.values.known(own)
            _set_fitting(world, out, value)
        return _finish(world, completion, outputs)
    own, out = inputs[0], outputs[0]
    even = len(set(input_splits or ())) <= 1 and len(set(output_splits or ())) <= 1
    peers = contributions(world, group, seq, 0, "all_to_all", own, equal=even)
    value = world.values.known(own)
    if value is not None and even and len(peers) == group.size() - 1:
        me, size = group.rank(), group.size()
        chunks = [_chunk((value if i == me else peers[i]).reshape(-1), me, size) for i in range(size)]
        world.values.set(out, torch.cat(chunks))
    else:
        _set_fitting(world, out, value)
    return _finish(world, completion, outputs)


def gather(
    world: VirtualWorld, group: RecordingGroup, own: torch.Tensor, outputs: Tensors, root: int, asynchronous: bool
) -> RecordedWork:
    """``outputs``: on the root one tensor per member (or one with all of them), elsewhere empty."""
    total = nbytes([own]) * group.size()
    call = Call("gather", (meta(own),), slots(outputs), total, dtype_name(own.dtype), root)
    seq, completion = issue(world, group, call, own.device, asynchronous=asynchronous)
    peers = contributions(world, group, seq, 0, "gather", own)
    value = world.values.known(own)
    if len(outputs) == 1 < group.size():
        parts = [peers.get(i, value) for i in range(group.size())]
        known = [p.reshape(-1) for p in parts if p is not None]
        world.values.set(outputs[0], torch.cat(known) if len(known) == len(parts) else None)
    else:
        for i, slot in enumerate(outputs):
            world.values.set(slot, peers.get(i, value))
    return _finish(world, completion, outputs or [own])


def scatter(
    world: VirtualWorld, group: RecordingGroup, out: torch.Tensor, inputs: Tensors, root: int, asynchronous: bool
) -> RecordedWork:
    """``inputs``: on the root one tensor per member, elsewhere empty (and then the answer is made up)."""
    total = nbytes([out]) * group.size()
    call = Call("scatter", slots(inputs), (meta(out),), total, dtype_name(out.dtype), root)
    seq, completion = issue(world, group, call, out.device, asynchronous=asynchronous)
    key = f"collective/{group.entry.index}/{seq}"
    if inputs:
        for i, chunk in enumerate(inputs):
            value = world.values.known(chunk)
            size = nbytes([chunk])
            if value is not None and size * group.size() <= PAYLOAD_MAX_BYTES:
                payload = Payload("scatter", size, dtype_name(chunk.dtype), tensor_bytes(value))
                world.payloads.put(world.rank, f"{key}/{i}", payload)
        world.values.set(out, world.values.known(inputs[group.rank()]))
        return _finish(world, completion, [out])
    rank = group.ranks[root]
    mine = Payload("scatter", nbytes([out]), dtype_name(out.dtype))
    theirs = world.payloads.get(rank, f"{key}/{group.rank()}")
    if theirs is not None and agree(world, group, f"call {seq}", rank, theirs, mine, True) and theirs.data is not None:
        world.values.set(out, bytes_tensor(theirs.data, out.dtype))
    else:
        _make_up(world, out, f"scatter from rank {rank}", None)
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
    completion = _p2p(world, group, Kind.SEND, own, world.rank, destination, tag)
    key = _p2p_key(world, group, world.rank, destination, tag, own.device)
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
    completion = _p2p(world, group, Kind.RECV, out, source, world.rank, tag)
    key = _p2p_key(world, group, source, world.rank, tag, out.device)
    mine = Payload("send", nbytes([out]), dtype_name(out.dtype))
    theirs = world.payloads.get(source, key)
    agreed = theirs is not None and agree(world, group, f"message {key.rsplit('/', 1)[1]}", source, theirs, mine, True)
    if theirs is not None and agreed and theirs.data is not None:
        world.values.set(out, bytes_tensor(theirs.data, out.dtype))
    else:
        echo = None
        if out.numel() == 1 and out.dtype in (torch.int32, torch.int64):
            echo = world.last_sent.get((group.entry.index, source))
        _make_up(world, out, f"recv from rank {source}", echo)
    return RecordedWork(world.recorder, [out], completion, peer)


def _p2p(world, group, kind: Kind, t: torch.Tensor, source: int, destination: int, tag: int) -> Completion:
    name = "send" if kind == Kind.SEND else "recv"
    return issue_p2p(world, group, name, (meta(t),), nbytes([t]), dtype_name(t.dtype), t.device, source, destination, tag)


def issue_p2p(
    world: VirtualWorld,
    group: RecordingGroup,
    name: str,
    metas: tuple[TensorMeta, ...],
    size: int,
    dtype: str,
    device: torch.device,
    source: int,
    destination: int,
    tag: int,
) -> Completion:
    """Record one send or recv between two global ranks, one of them this one."""
    recorder = world.recorder
    sending = name == "send"
    place = Place.point_to_point(recorder, group, device, source, destination)
    place.begin()
    recorder.communication(
        Kind.SEND if sending else Kind.RECV,
        OpSignature(name, metas if sending else (), () if sending else metas),
        group=group.entry.index,
        bytes=size,
        dtype=dtype,
        peer=destination if sending else source,
        tag=tag,
        stream=place.stream,
    )
    return place.end()


def _p2p_key(world, group, source: int, destination: int, tag: int, device: torch.device) -> str:
    """Messages of a pair match in order; NCCL ignores tags, gloo does not."""
    lane = f"p2p/{group.entry.index}/{source}/{destination}"
    if group.runs_on_host(device):
        lane += f"/{tag}"
    return f"{lane}/{world.next_message(lane)}"


# ---- small helpers ----


def _make_up(world: VirtualWorld, out: torch.Tensor, what: str, echo: int | None) -> None:
    """A value nobody gave: counted, finite and not degenerate."""
    dtype = dtype_name(out.dtype)
    if not is_control(out.dtype):
        if world.values.pretended(out):
            world.values.set(out, None)
        else:
            noise = host_tensors.empty(out.shape, torch.float32).normal_(0, RECEIVED_STD, generator=world.generator)
            world.values.set(out, noise.to(out.dtype))
        if nbytes([out]) <= PAYLOAD_MAX_BYTES:
            world.recorder.assume(f"{what} of {dtype}", f"N(0, {RECEIVED_STD})")
        return
    if world.values.pretended(out) and nbytes([out]) > PAYLOAD_MAX_BYTES:
        world.values.set(out, None)
        return
    value = policy_value(out.dtype) if echo is None else echo
    world.values.set(out, host_tensors.full(out.shape, value, out.dtype))
    world.recorder.assume(f"{what} of {dtype}", value)


def _set_fitting(world: VirtualWorld, out: torch.Tensor, value: torch.Tensor | None) -> None:
    """Uneven sizes: the common prefix, then zeros."""
    if value is None:
        world.values.set(out, None)
        return
    flat = value.reshape(-1)
    if flat.numel() != out.numel():
        padded = host_tensors.zeros((out.numel(),), out.dtype)
        common = min(flat.numel(), out.numel())
        padded[:common] = flat[:common]
        flat = padded
    world.values.set(out, flat.to(out.dtype))


def _with(call: Call, reduce: str, count: int) -> Call:
    return Call(call.name, call.inputs, call.outputs, call.bytes, call.dtype, call.root, _attrs(reduce, count))


def _dtype(tensors: Tensors) -> str:
    return dtype_name(tensors[0].dtype)


def _listed(t: torch.Tensor | Tensors) -> list[torch.Tensor]:
    return [t] if isinstance(t, torch.Tensor) else list(t)


def _chunk(flat: torch.Tensor, index: int, size: int) -> torch.Tensor:
    length = flat.numel() // size
    return flat.reshape(-1)[index * length : (index + 1) * length]


def _elements(tensors: Tensors, splits: Sequence[int] | None) -> tuple[int, ...] | None:
    """Split sizes in elements; None when even."""
    if len(set(splits or ())) == 1:
        return None
    if splits:
        row = tensors[0].numel() // max(1, tensors[0].shape[0]) if tensors[0].dim() else 1
        return tuple(int(n) * row for n in splits)
    if len({t.numel() for t in tensors}) > 1:
        return tuple(t.numel() for t in tensors)
    return None

