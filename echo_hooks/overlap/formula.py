"""The white-box formula: waves on the SMs that are left, and a share of the memory bandwidth. No constant is fitted.

While a collective with c channels and a share h of the memory bandwidth runs beside a kernel with a share d:

    waves    w = ceil(t / (k (P - c))) / ceil(t / (k P))      t blocks, k on an SM, P SMs; at least one more round of
                                                              tiles where one block per SM walks over them
    memory   m = max(1, d + h)
    kernel   max(w, m), of m only as far as memory is what bounds it: also a kernel that memory bounds needs its SMs
             to keep enough loads under way
    waiting  w, less where memory bounds: nothing else is on the memory then

A call must find SMs first. Where a kernel's blocks fill them all, those that wait their turn go before the call's, so
that it starts when the kernel ends; back to back, each call then takes a whole number of kernels, and the kernels are
slowed only for the share of that time in which the call runs.
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
    """Factors, 1 for none: of the kernel while the call is under way, of the kernel while the call only waits for a
    member, of the call."""
    d = of_kernel or demand(kernel, accelerator)
    taken, sms = sms_taken(call, accelerator), accelerator.multiprocessors
    waves = wave_factor(d.blocks, d.per_sm, sms, taken)
    if taken and d.persistent:
        waves = max(waves, 1.0 + 1.0 / max(d.blocks / (d.per_sm * sms), 1.0))
    memory = min(d.bytes_share / _REACHED, 1.0)
    compute = max(min(d.flops_share / _REACHED, 1.0), 1e-6)
    bound = max(memory, compute)
    crowded = max(1.0, memory + call_bytes_share(call, accelerator) / _REACHED)
    waiting = waves if compute > memory else max(1.0, waves * compute / bound)
    moving = max(waves, crowded * memory / bound)
    busy_us = call.run_us * crowded
    if taken and d.blocks >= d.per_sm * sms:
        kernel_us = max(kernel.run_us * moving, 1.0)
        whole_us = math.ceil(busy_us / kernel_us) * kernel_us
        moving = 1.0 + (moving - 1.0) * busy_us / whole_us
        busy_us = whole_us
    return moving, waiting, max(busy_us / max(call.run_us, 1e-3), 1.0)
