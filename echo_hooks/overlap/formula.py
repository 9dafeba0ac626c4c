"""The white-box formula: waves on the SMs that are left, and a share of the memory bandwidth.

While a collective with c channels and a share h of the memory bandwidth runs beside a kernel with a share d:

    waves    w = ceil(t / (k (P - c))) / ceil(t / (k P))      t blocks, k on an SM, P SMs
    memory   m = max(1, d + h)
    kernel   max(compute w, memory m) over max(compute, memory)

A call must find SMs first. Where a kernel's blocks fill them all, those that wait their turn go before the call's, so
that it starts when the kernel ends; back to back, each call then takes a whole number of kernels.
"""

from __future__ import annotations

import math

from echo_hooks.hardware.accelerator import Accelerator
from echo_hooks.overlap.pair import Call, Kernel
from echo_hooks.overlap.work import Demand, call_bytes_share, demand, sms_taken, wave_factor

_REACHED = 0.92
"""Share of the memory's peak that a copy reaches: 4.4 of 4.8 TB/s for two long vectors added on an H200."""


def formula(
    kernel: Kernel, call: Call, accelerator: Accelerator, of_kernel: Demand | None = None
) -> tuple[float, float, float]:
    """Factors, 1 for none: of the kernel while the call moves data, of the kernel while the call only waits, of the
    call."""
    d = of_kernel or demand(kernel, accelerator)
    taken = sms_taken(call, accelerator)
    waves = wave_factor(d.blocks, d.per_sm, accelerator.multiprocessors, taken)
    memory = min(d.bytes_share / _REACHED, 1.0)
    compute = max(min(d.flops_share / _REACHED, 1.0), 1e-6)
    h = call_bytes_share(call, accelerator) / _REACHED
    crowded = max(1.0, memory + h)
    bound = max(memory, compute)
    if memory >= compute:  # few SMs saturate the memory, so that waves matter as far as arithmetic does
        waiting = max(1.0, waves * compute / bound)
        moving = max(waiting, crowded)
    else:
        waiting = waves
        moving = max(waves, crowded * memory / bound)
    busy_us = call.run_us * crowded
    if taken and d.blocks >= d.per_sm * accelerator.multiprocessors:
        kernel_us = max(kernel.run_us * moving, 1.0)
        busy_us = math.ceil(busy_us / kernel_us) * kernel_us
    return moving, waiting, max(busy_us / max(call.run_us, 1e-3), 1.0)
