"""Device memory that no tensor of the script holds: context, libraries' kernels, communicators. What cuBLAS works in is
not here: PyTorch takes it out of its allocator, so that it is allocated memory (``capture.memory``)."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from echo_hooks.graph.program import HOST_STREAM, Kind
from echo_hooks.graph.rundir import RankTrace, Run
from echo_hooks.hardware.accelerator import Accelerator
from echo_hooks.network.model import CommunicationModel

# Driver's structures and the kernels loaded so far, modules being loaded when first used (CUDA 11.7 and later).
# Measured on an H200 (bench/results/device_memory_h200.json): 619 MiB at first use, 84 more for cuBLAS and cuDNN.
_HOPPER_CONTEXT_BYTES, _CONTEXT_BYTES = 703 << 20, 400_000_000
_NCCL_BYTES = 354 << 20
"""NCCL's kernels and what it sets up once: there, the first communicator's 366 MiB and its first call's 474, less the
486 that a second communicator takes for both."""
CONTEXT_SOURCE = (
    "extra memory is modelled: the context with cuBLAS and cuDNN 703 MiB from Hopper on, NCCL's kernels 354 MiB"
    " (measured on H200: bench/results/device_memory_h200.json), the context 400 MB before (pytorch/pytorch#109888);"
    " communicators by NCCL's buffers per channel and peer; cuBLAS workspaces are in allocated"
)


def add_extra_memory(run: Run, accelerator: Accelerator, model: CommunicationModel) -> None:
    """Fill ``memory.extra`` of each role, in bytes by name: "context", "communicator NAME" for each group that the
    role's traced rank communicates on, and "NCCL" for what all of these share."""
    for role in run.roles:
        trace = run.traces[role.traced_rank]
        extra = {"context": context_bytes(accelerator)}
        communicators = {name: size for name, size in communicator_bytes(trace, model).items() if size}
        if communicators and accelerator.vendor == "nvidia":
            extra["NCCL"] = _NCCL_BYTES
        extra |= {f"communicator {name}": size for name, size in communicators.items()}
        role.memory.extra = {name: size for name, size in extra.items() if size}


def context_bytes(accelerator: Accelerator) -> int:
    """What a process takes of a device before it allocates anything."""
    if accelerator.vendor != "nvidia":
        return _CONTEXT_BYTES
    return _HOPPER_CONTEXT_BYTES if (accelerator.compute_capability or (0, 0)) >= (9, 0) else _CONTEXT_BYTES


def communicator_bytes(trace: RankTrace, model: CommunicationModel) -> dict[str, int]:
    """Bytes by name of the group, over all its groups that the rank has communicated on, set-up included."""
    program = trace.whole()
    on_device = np.isin(program.kind, (Kind.COLLECTIVE, Kind.SEND, Kind.RECV)) & (program.stream != HOST_STREAM)
    taken: dict[str, int] = defaultdict(int)
    for index in np.unique(program.group[on_device & (program.group >= 0)]).tolist():
        group = trace.groups[index]
        own = on_device & (program.group == index)
        if group.size < 2 or not own.any():
            continue
        calls: dict[tuple[str, str], set[int]] = defaultdict(set)
        for record in np.flatnonzero(own & (program.kind == Kind.COLLECTIVE)).tolist():
            name = trace.ops[program.op[record]].name if program.op[record] >= 0 else "all_reduce"
            calls[name, program.strings[program.dtype[record]] or "uint8"].add(max(1, int(program.bytes[record])))
        sizes = {key: np.array(sorted(found), np.float64) for key, found in calls.items()}
        sends = own & np.isin(program.kind, (Kind.SEND, Kind.RECV)) & (program.peer >= 0)
        pairs = {(trace.rank, int(peer)) for peer in np.unique(program.peer[sends])}
        taken[group.name] += model.device_memory(group.ranks, sizes, pairs or {(trace.rank, trace.rank)})
    return dict(taken)
