"""What is known of a kernel and a communication that run together, on whichever path it came."""

from __future__ import annotations

from dataclasses import dataclass

from echo_hooks.graph.ops import OpSignature
from echo_hooks.overlap.samples import UNKNOWN, Launch, Sample


@dataclass(frozen=True)
class Kernel:
    """One op alone on a device: ``run_us``; ``launch`` where a profiler saw it."""

    signature: OpSignature
    run_us: float
    launch: Launch = UNKNOWN


@dataclass(frozen=True)
class Call:
    """One communication alone: ``name`` as the network model has it, or "send", "recv", "exchange"; ``bytes`` as
    nccl-tests counts them; ``channels``: SMs its kernel takes."""

    name: str
    bytes: int
    run_us: float
    channels: int
    ranks: int
    ranks_per_node: int
    algorithm: str = ""
    protocol: str = ""


def pair_of(sample: Sample, *, with_launch: bool = True) -> tuple[Kernel, Call]:
    """The two that a sample measured."""
    launch = sample.launch if with_launch else UNKNOWN
    call = Call(
        sample.call,
        sample.bytes,
        sample.call_base_us,
        sample.channels,
        sample.ranks,
        sample.ranks_per_node,
        sample.algorithm,
        sample.protocol,
    )
    return Kernel(sample.signature, sample.base_us, launch), call
