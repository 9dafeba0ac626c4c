"""What the other ranks put in: known from their traces where they have been traced, else made up and counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from echo_hooks import host_tensors
from echo_hooks.graph.ops import dtype_name
from echo_hooks.graph.problems import Problem
from echo_hooks.world import filling
from echo_hooks.world.payloads import PAYLOAD_MAX_BYTES, Payload, bytes_tensor, tensor_bytes
from echo_hooks.world.record import nbytes
from echo_hooks.world.values import RECEIVED_STD, is_control, policy_value

if TYPE_CHECKING:
    from echo_hooks.world.group import RecordingGroup
    from echo_hooks.world.virtual_world import VirtualWorld


def keep(world: VirtualWorld, group: RecordingGroup, seq: int, part: int, name: str, own: torch.Tensor):
    """Keep what this rank puts into a call, for ranks traced later; returns it, or None when it is no control payload.

    ``part``: index of the tensor in a coalesced call.
    """
    size = nbytes([own])
    if size > PAYLOAD_MAX_BYTES or group.size() == 1:
        return None
    value = world.values.known(own)
    payload = Payload(name, size, dtype_name(own.dtype), None if value is None else tensor_bytes(value))
    world.payloads.put(world.rank, _key(group, seq, part), payload)
    return payload


def _key(group: RecordingGroup, seq: int, part: int) -> str:
    return f"collective/{group.entry.index}/{seq}/{part}"


def contributions(
    world: VirtualWorld, group: RecordingGroup, seq: int, part: int, name: str, own: torch.Tensor, *, equal: bool = True
) -> dict[int, torch.Tensor]:
    """Keep ``own`` and return the known values of the peers, by group rank, each flat.

    ``equal``: every member must bring the same number of bytes.
    """
    mine = keep(world, group, seq, part, name, own)
    if mine is None:
        return {}
    value = world.values.known(own)
    found: dict[int, torch.Tensor] = {}
    for rank in world.payloads.ranks():
        if rank == world.rank or rank not in group.members:
            continue
        theirs = world.payloads.get(rank, _key(group, seq, part))
        if theirs is None or not agree(world, group, f"call {seq}", rank, theirs, mine, equal):
            continue
        if theirs.data is not None:
            data = bytes_tensor(theirs.data, own.dtype)
            found[group.members[rank]] = data if value is None else data.to(value.device)
    if value is not None and len(found) < group.size() - 1 and mine.bytes:
        world.recorder.assume(f"peers' values in {name} of {mine.dtype}", "as this rank's own")
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


def from_root(
    world: VirtualWorld, group: RecordingGroup, seq: int, name: str, own: torch.Tensor, root: int
) -> torch.Tensor | None:
    """The root's payload on a member that has it from the store; None on the root itself or when unknown."""
    if group.rank() == root:
        keep(world, group, seq, 0, name, own)
        return None
    rank = group.ranks[root]
    mine = Payload(name, nbytes([own]), dtype_name(own.dtype))
    if not 0 < mine.bytes <= PAYLOAD_MAX_BYTES:
        return None
    value = replayed(world, group, _key(group, seq, 0), f"call {seq}", rank, mine, own)
    if value is None:
        if is_control(own.dtype):
            world.unanswered.add(rank)
        world.recorder.assume(f"{name} of {mine.dtype} from rank {rank}", "as this rank's own")
    return value


def replayed(
    world: VirtualWorld, group: RecordingGroup, key: str, what: str, rank: int, mine: Payload, like: torch.Tensor
) -> torch.Tensor | None:
    """What ``rank`` has left under ``key``, flat, if it agrees with the call that this rank makes."""
    theirs = world.payloads.get(rank, key)
    if theirs is None or not agree(world, group, what, rank, theirs, mine, True) or theirs.data is None:
        return None
    return bytes_tensor(theirs.data, like.dtype)


def message_key(
    world: VirtualWorld, group: RecordingGroup, source: int, destination: int, tag: int, device: torch.device
) -> str:
    """Messages of a pair match in order; NCCL ignores tags, gloo does not."""
    lane = f"p2p/{group.entry.index}/{source}/{destination}"
    if group.runs_on_host(device):
        lane += f"/{tag}"
    return f"{lane}/{world.next_message(lane)}"


def make_up(world: VirtualWorld, out: torch.Tensor, name: str, source: int, echo: int | None = None) -> None:
    """A value that ``source`` would have sent: finite and not degenerate, counted where it can steer a program.

    ``echo``: the answer to an integer, if there is a better one than the policy's.
    """
    small = nbytes([out]) <= PAYLOAD_MAX_BYTES
    answer: str | int
    if world.values.in_place:
        answer = filling.made_up(out, echo, world.device_generator(out.device))
    elif is_control(out.dtype):
        if world.values.pretended(out) and not small:
            world.values.set(out, None)
            return
        answer = policy_value(out.dtype) if echo is None else echo
        world.values.set(out, host_tensors.full(out.shape, answer, out.dtype))
    elif world.values.pretended(out):
        world.values.set(out, None)  # counted if anyone ever asks
        return
    else:
        noise = host_tensors.empty(out.shape, torch.float32).normal_(0, RECEIVED_STD, generator=world.generator)
        world.values.set(out, noise.to(out.dtype))
        answer = f"N(0, {RECEIVED_STD})"
    if small and is_control(out.dtype):
        world.unanswered.add(source)
    world.recorder.assume(f"{name} from rank {source} of {dtype_name(out.dtype)}", answer)


def set_fitting(world: VirtualWorld, out: torch.Tensor, value: torch.Tensor | None) -> None:
    """Uneven sizes: the common prefix, then zeros."""
    if value is not None and world.values.in_place:
        filling.fitted(value, out)
        return
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
