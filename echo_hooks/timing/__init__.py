"""How long a local operation takes alone on the device."""

from __future__ import annotations

from echo_hooks.timing.fill import fill_durations
from echo_hooks.timing.pricing import Pricing, load_pricing
from echo_hooks.timing.roofline import Estimate, estimate

__all__ = ["Estimate", "Pricing", "estimate", "fill_durations", "load_pricing"]
