"""How much a device slows its clock under a training step: matrix products draw more power than it may."""

from __future__ import annotations

import numpy as np

from echo_hooks.graph.program import Kind, Program

PRODUCTS_WEIGHT, OTHERS_WEIGHT, FREE = 0.6, 0.4, 0.44
"""Products take 1 + max(0, 0.6 p + 0.4 o - 0.44) times as long as on a rested device, where they run for a share p of
the step and other kernels for a share o. Fitted by bench/product_clock.py to 36 ranks that really ran on H200, with p
up to 0.76: off by 1.1 % (root mean square). A device that only multiplies is 1.16 times as slow; kept busy with
products alone (condition "loaded"), those of the database take 1.07 times as long in the median and 1.18 at most."""

_ROUNDS = 8


def slowdown(products_us: float, others_us: float, step_us: float) -> float:
    """Factor on products that take ``products_us`` in all on a rested device, in a step of ``step_us`` with other
    kernels of ``others_us``; the step takes no less than all of its kernels. 1 where nothing runs."""
    factor = 1.0
    for _ in range(_ROUNDS):  # slower products take a larger share; each round changes that by less than two thirds
        busy_us = products_us * factor + others_us
        whole_us = max(step_us, busy_us)
        if whole_us <= 0.0:
            return 1.0
        drawn = (PRODUCTS_WEIGHT * products_us * factor + OTHERS_WEIGHT * others_us) / whole_us
        factor = 1.0 + max(0.0, drawn - FREE)
    return factor


def host_step_us(program: Program, host_launch_us: float) -> float:
    """What the host takes for the program's steps."""
    launches = int(np.isin(program.kind, (Kind.COMPUTE, Kind.COPY, Kind.COLLECTIVE, Kind.SEND, Kind.RECV)).sum())
    return float(program.host_us.sum()) + launches * host_launch_us
