"""Durations over sizes that never fall with more bytes nor with a slower link.

NCCL's choices jump with size and with the speed of links, and a jump can go the wrong way: real logs hold a larger
message that finishes sooner. A plan that is compared with another must not win by such an accident, so:

- over sizes the running maximum is taken: a message takes at least as long as any smaller one;
- over links the running minimum: what NCCL would do on any slower link, its duration there, bounds it from above.
  Links enter NCCL's choice in steps (``SCALE_UP_LINKS``, ``NIC_GB_PER_S``), so "any slower link" is a short ladder;
  within a step the choice stands and the duration falls with the link's speed by its formula.

Curves are tabulated at fixed sizes, eight to the octave, and straight in between; that keeps both properties exactly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from echo_hooks.network.calibration import Scaling
from echo_hooks.network.durations import Reach
from echo_hooks.network.nccl_graph import Communicator
from echo_hooks.network.nccl_tables import NVLINK_GB_PER_S
from echo_hooks.network.plan import Planned

# Steps in which links enter NCCL's choice: NVLinks of real accelerators; NICs of 10 Gb/s to 800 Gb/s, in GB/s.
SCALE_UP_LINKS = (1, 2, 4, 6, 8, 12, 18)
NIC_GB_PER_S = (1.25, 3.125, 6.25, 12.5, 24.0, 48.0, 96.0)

SIZES = np.unique(np.round(2.0 ** (np.arange(8 * 42 + 1) / 8)))
_SIZES = SIZES.tolist()


@dataclass(frozen=True)
class Samples:
    """Over ``SIZES``: latency and transfer in us, index into ``choices`` (algorithm, protocol), channels."""

    latency: np.ndarray
    transfer: np.ndarray
    choice: np.ndarray
    channels: np.ndarray
    choices: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Point:
    """What runs at one size, and how long."""

    duration_us: float
    latency_us: float
    algorithm: str
    protocol: str
    channels: int


class Curve:
    """Duration over bytes; ``at(bytes)`` costs a search in a short list."""

    def __init__(self, samples: Samples, duration: np.ndarray):
        self.duration_us = duration  # over SIZES
        self._duration = duration.tolist()
        # Where the running maximum or minimum moved the duration, latency keeps its share of it.
        share = samples.latency / np.maximum(samples.latency + samples.transfer, 1e-300)
        self._latency = (share * duration).tolist()
        self._choice = [samples.choices[i] for i in samples.choice.tolist()]
        self._channels = samples.channels.tolist()

    def at(self, bytes: float) -> Point:
        i = min(max(bisect_right(_SIZES, bytes) - 1, 0), len(_SIZES) - 2)
        share = max(0.0, (bytes - _SIZES[i]) / (_SIZES[i + 1] - _SIZES[i]))
        duration = self._duration[i] + share * (self._duration[i + 1] - self._duration[i])
        latency = self._latency[i] + share * (self._latency[i + 1] - self._latency[i])
        algorithm, protocol = self._choice[i]
        return Point(duration, min(max(latency, 0.0), duration), algorithm, protocol, self._channels[i])


def samples(planned: list[Planned], scaling_of: Callable[[str, str], Scaling]) -> Samples:
    """What a plan over ``SIZES`` takes by the multipliers of each algorithm and protocol."""
    latency, transfer = np.empty(len(SIZES)), np.empty(len(SIZES))
    choice, channels = np.empty(len(SIZES), np.int64), np.empty(len(SIZES), np.int64)
    for i, row in enumerate(planned):
        scaling = scaling_of(row.algorithm, row.protocol)
        latency[row.where] = row.parts.latency_us(scaling)
        transfer[row.where] = row.parts.transfer_us(scaling)
        choice[row.where], channels[row.where] = i, row.channels
    return Samples(latency, transfer, choice, channels, tuple((row.algorithm, row.protocol) for row in planned))


class Steps:
    """Durations over ``SIZES`` of ``sample(comm, reach)``, which NCCL's choice takes from ``comm`` and the duration from
    ``reach``.

    ``samples``: what runs, on the links as they are. ``first``: their running maximum over sizes. ``bounded``: the same,
    and nowhere above that of slower links; worked out when first asked for.
    """

    def __init__(self, sample: Callable[[Communicator, Reach], Samples], comm: Communicator, reach: Reach):
        self._sample = sample
        self._ladder = ladder(comm, reach)
        self.samples = sample(*next(self._ladder))  # the ladder has at least the step it stands on
        self.first = _rising(self.samples)
        self._bounded: np.ndarray | None = None

    @property
    def bounded(self) -> np.ndarray:
        if self._bounded is None:
            self._bounded = self.first
            for comm, reach in self._ladder:
                self._bounded = np.minimum(self._bounded, _rising(self._sample(comm, reach)))
        return self._bounded


def _rising(samples: Samples) -> np.ndarray:
    return np.maximum.accumulate(samples.latency + samples.transfer)


def ladder(comm: Communicator, reach: Reach) -> Iterator[tuple[Communicator, Reach]]:
    """The communicator as NCCL's choice sees it, then on every step with slower links; each with the fastest links
    that still are on that step."""
    link = NVLINK_GB_PER_S[comm.architecture]
    scale_up = _steps([n * link for n in SCALE_UP_LINKS], comm.nvlink) if comm.per_node > 1 and comm.nvlink else [None]
    nic = _steps(list(NIC_GB_PER_S), comm.nic) if comm.nodes > 1 else [None]
    for up in scale_up:
        for out in nic:
            step_comm, step_reach = comm, reach
            if up is not None:
                step_comm = replace(step_comm, nvlink=up[0])
                step_reach = replace(step_reach, scale_up=reach.scale_up * up[1] / comm.nvlink)
            if out is not None:
                step_comm = replace(step_comm, nic=out[0])
                step_reach = replace(step_reach, node=reach.node * out[1] / comm.nic)
            yield step_comm, step_reach


def _steps(steps: list[float], speed: float) -> list[tuple[float, float]]:
    """(step, fastest speed on it that is not above ``speed``), from the step of ``speed`` down."""
    below = [s for s in steps if s <= speed * (1 + 1e-9)] or steps[:1]
    tops = [*below[1:], speed]
    return list(zip(below, tops))[::-1]
