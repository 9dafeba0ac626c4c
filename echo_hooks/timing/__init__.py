"""How long a local operation takes alone on the device."""

from __future__ import annotations

from echo_hooks.timing.fill import fill_durations
from echo_hooks.timing.roofline import Estimate, estimate

__all__ = ["Estimate", "estimate", "fill_durations"]
