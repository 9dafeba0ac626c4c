"""The white-box formula: waves on the SMs that are left, and a share of the memory bandwidth.

While a collective with c channels and a share h of the memory bandwidth runs beside a kernel with a share d:

    waves    w = ceil(t / (k (P - c))) / ceil(t / (k P))      t blocks, k on an SM, P SMs
    memory   m = max(1, d + h)
    kernel   max(compute w, memory m) over max(compute, memory)

A call must find SMs first: where a kernel's blocks fill them, it starts as they retire.
"""

from __future__ import annotations

from echo_hooks.hardware.accelerator import Accelerator
from echo_hooks.overlap.pair import Call, Kernel
from echo_hooks.overlap.work import Demand, call_bytes_share, demand, wave_factor

_REACHED = 0.92
"""Share of the memory's peak that a copy reaches: 4.4 of 4.8 TB/s for two long vectors added on an H200."""


def formula(
    kernel: Kernel, call: Call, accelerator: Accelerator, of_kernel: Demand | None = None
) -> tuple[float, float, float]:
    """Factors, 1 for none: of the kernel while the call moves data, of the kernel while the call only waits, of the
    call."""
    d = of_kernel or demand(kernel, accelerator)
    waves = wave_factor(d.blocks, d.per_sm, accelerator.multiprocessors, call.channels)
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
    waves_alone = max(d.blocks / (d.per_sm * accelerator.multiprocessors), 1.0)
    retire_us = kernel.run_us if d.persistent else kernel.run_us / waves_alone
    delay_us = 0.5 * retire_us if d.blocks >= d.per_sm * accelerator.multiprocessors else 0.0
    return moving, waiting, max(1.0, crowded) + delay_us / max(call.run_us, 1.0)
