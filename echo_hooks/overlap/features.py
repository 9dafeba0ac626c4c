"""Features of a pair, from what the composer knows of an op and a call: no metric of a profiler is needed.

Launch geometry is used where a profiler saw it, else NaN, which the trees take as "not known".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from echo_hooks.hardware.accelerator import Accelerator
from echo_hooks.overlap.formula import formula
from echo_hooks.overlap.pair import Call, Kernel
from echo_hooks.overlap.samples import Launch
from echo_hooks.overlap.work import blocks_per_sm, bus_share, call_bytes_share, demand, sms_taken, wave_factor

VERSION = 1
"""Raised whenever the meaning of a feature changes: a model says which it was trained on."""

_CLASSES = (
    "gemm", "attention_forward", "attention_backward", "norm", "norm_backward", "softmax", "softmax_backward",
    "elementwise", "cast", "strided", "activation", "reduction", "optimizer", "gather", "scatter", "concatenate",
    "fill", "random", "sort",
)  # fmt: skip
_CALLS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "exchange")
_KNOWN_AS = {"send": "exchange", "recv": "exchange", "gather": "all_gather", "scatter": "reduce_scatter",
             "broadcast": "all_gather", "reduce": "reduce_scatter"}  # fmt: skip

NAMES = (
    *(f"is_{name}" for name in _CLASSES),
    "ln_run_us", "ln_bytes", "ln_flops", "bytes_share", "written_share", "flops_share", "footprint_over_l2",
    "ln_blocks", "waves", "waves_left", "wave_factor", "persistent",
    "launch_blocks", "launch_threads", "launch_registers", "launch_shared_bytes", "launch_kernels", "launch_waves",
    "launch_wave_factor", "launch_per_sm",
    *(f"call_{name}" for name in _CALLS),
    "call_ln_us", "call_ln_bytes", "call_channels", "call_sm_share", "call_bus_share", "call_bytes_share",
    "call_ranks", "call_ranks_per_node", "call_low_latency", "call_tree",
    "ln_call_over_kernel", "ln_call_over_wave", "fills", "kernels_per_call", "memory_wanted",
    "ln_formula_kernel", "ln_formula_waiting", "ln_formula_call",
    "device_multiprocessors", "device_bytes_per_us", "device_flops_per_byte",
)  # fmt: skip


def features(pairs: Sequence[tuple[Kernel, Call]], accelerator: Accelerator) -> np.ndarray:
    """Rows of NAMES (float32 [n, len(NAMES)])."""
    table = np.empty((len(pairs), len(NAMES)), np.float32)
    known: dict[int, tuple] = {}
    for i, (kernel, call) in enumerate(pairs):
        if id(kernel) not in known:
            known[id(kernel)] = (demand(kernel, accelerator), kernel)
        table[i] = _row(kernel, call, accelerator, known[id(kernel)][0])
    return table


def _row(kernel: Kernel, call: Call, a: Accelerator, d) -> list[float]:
    name = _KNOWN_AS.get(call.name, call.name)
    sms, taken = a.multiprocessors, sms_taken(call, a)
    waves = d.blocks / (d.per_sm * sms)
    left = d.blocks / (d.per_sm * max(sms - taken, 1))
    h = call_bytes_share(call, a)
    moving, waiting, beside = formula(kernel, call, a, d)
    wave_us = kernel.run_us / max(waves, 1.0)
    peak_flops = a.peak_flops.get("bfloat16", a.peak_flops["float32"])
    return [
        *(float(d.group == c) for c in _CLASSES),
        _ln(kernel.run_us), _ln(d.bytes), _ln(d.flops), d.bytes_share, d.written_share, d.flops_share,
        d.bytes / a.l2_bytes, _ln(d.blocks), min(waves, 1e4), min(left, 1e4),
        wave_factor(d.blocks, d.per_sm, sms, taken), float(d.persistent),
        *_launch(kernel.launch, sms, taken),
        *(float(name == c) for c in _CALLS),
        _ln(call.run_us), _ln(call.bytes), float(taken), taken / sms, bus_share(call, a), h,
        float(call.ranks), float(call.ranks_per_node), float(call.protocol.lower() in ("ll", "ll128")),
        float("tree" in call.algorithm.lower()),
        _ln(call.run_us) - _ln(kernel.run_us), _ln(call.run_us) - _ln(wave_us), float(waves >= 1.0),
        min(call.run_us / max(kernel.run_us, 1.0), 1e3),
        d.bytes_share + h,
        _ln(moving), _ln(waiting), _ln(beside),
        float(sms), a.memory_bandwidth_bytes_per_s / 1e6, peak_flops / a.memory_bandwidth_bytes_per_s,
    ]  # fmt: skip


def _launch(launch: Launch, sms: int, taken: int) -> list[float]:
    per_sm = blocks_per_sm(launch)
    if not per_sm:
        return [math.nan] * 8
    waves = launch.blocks / (per_sm * sms)
    factor = wave_factor(launch.blocks, per_sm, sms, taken)
    return [
        float(launch.blocks), float(launch.threads), float(launch.registers), float(launch.shared_bytes),
        float(launch.kernels), min(waves, 1e4), factor, float(per_sm),
    ]  # fmt: skip


def _ln(value: float) -> float:
    return math.log(max(value, 1e-3))
