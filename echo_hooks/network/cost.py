"""What one communication costs, and the resources it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Resource:
    """Something that operations share: a link in one direction."""

    name: str
    capacity_bytes_per_us: float


@dataclass(frozen=True, slots=True)
class Cost:
    """``duration_us``: alone, from the arrival of the last member to the end. ``latency_us``: the part of it that
    sharing links does not stretch. ``loads``: (index into the model's resources, bytes) the operation moves there.
    ``channels``: SMs a GPU's kernel takes. ``evidence``: always "modelled", with a calibration too: a formula fitted
    to measurements is not a measurement."""

    duration_us: float
    latency_us: float
    algorithm: str
    protocol: str
    channels: int
    loads: Sequence[tuple[int, float]]
    evidence: str = "modelled"
