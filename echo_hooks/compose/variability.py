"""The band of the step time: how far it moves when its inputs are as wrong, and as uneven, as they may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from echo_hooks.compose.engine import run
from echo_hooks.compose.folding import Partition
from echo_hooks.compose.result import Band
from echo_hooks.compose.tables import Tables
from echo_hooks.compose.timelines import completions
from echo_hooks.compose.world import World
from echo_hooks.graph.ops import OpSignature
from echo_hooks.graph.program import Evidence

INPUT_SIGMA: dict[Evidence, float] = {
    Evidence.NONE: 0.30,
    Evidence.MEASURED: 0.02,
    Evidence.PROFILED: 0.05,
    Evidence.MODELLED: 0.10,
    Evidence.ASSUMED: 0.30,
}
"""Standard deviation of the logarithm of a duration by where it comes from. Assumed, until a comparison with measured
steps gives better ones."""


@dataclass(frozen=True)
class Variability:
    """``samples`` simulations with other inputs, drawn from ``seed``.

    Every distinct operation and call gets a factor of its own, equal on all ranks (an error of its model), log-normal
    with the ``sigma`` of its evidence; and every single kernel one more, independent, with sigma ``jitter`` (noise of
    the machine). The noise is drawn per simulated class: for the slowest of many equal ranks to show, simulate
    unfolded.
    """

    samples: int = 32
    seed: int = 0
    jitter: float = 0.0
    sigma: Mapping[Evidence, float] = field(default_factory=lambda: INPUT_SIGMA)


def band(
    world: World,
    partition: Partition,
    tables: Tables,
    repeat: int,
    host_launch_us: float,
    step_time_us: float,
    variability: Variability,
) -> Band:
    """P10, P50 and P90 of ``step_time_us``: the spread of the samples' periods around that of the undisturbed inputs,
    both with constant durations."""
    rng = np.random.default_rng(variability.seed)
    operations, of_record = _operations(world, variability.sigma)
    calls, of_call = _calls(world, tables, variability.sigma)
    undisturbed = _period(world, partition, tables, repeat, host_launch_us)
    ratios = []
    for sample in range(variability.samples):
        run_us = tables.programs.run_us * np.exp(operations * rng.standard_normal(len(operations)))[of_record]
        cost_us = tables.classes.cost_us * np.exp(calls * rng.standard_normal(len(calls)))[of_call]
        disturbed = Tables(
            tables.programs._replace(run_us=run_us),
            tables.classes._replace(cost_us=cost_us),
            tables.channels,
            tables.ends,
            tables.missing,
            tables.call_evidence,
            tables.call_latency_us,
        )
        period = _period(
            world, partition, disturbed, repeat, host_launch_us, variability.jitter, variability.seed + 1 + sample
        )
        ratios.append(period / undisturbed if undisturbed > 0 else 1.0)
    p10, p50, p90 = (float(x) * step_time_us for x in np.quantile(ratios, [0.1, 0.5, 0.9]))
    return Band(p10, p50, p90)


def _period(
    world: World,
    partition: Partition,
    tables: Tables,
    repeat: int,
    host_launch_us: float,
    jitter: float = 0.0,
    seed: int = 0,
) -> float:
    state, finished = run(tables, repeat, host_launch_us, jitter=jitter, seed=seed)
    assert finished, "a plan that ends with some durations ends with any"
    done = completions(world, partition, tables, state, repeat)
    return float((done[:, -1] - done[:, 0]).max()) / (repeat - 1)


def _operations(world: World, sigma: Mapping[Evidence, float]) -> tuple[np.ndarray, np.ndarray]:
    """Sigma per distinct operation of the world, and the operation of each record."""
    number: dict[tuple[OpSignature | None, int], int] = {}
    columns = []
    for program in world.programs:
        pairs = np.stack([program.program.op.astype(np.int64), program.program.evidence.astype(np.int64)], axis=1)
        distinct, inverse = np.unique(pairs, axis=0, return_inverse=True)
        named = [(program.ops[op] if op >= 0 else None, kind) for op, kind in distinct.tolist()]
        columns.append(
            np.asarray([number.setdefault(key, len(number)) for key in named], np.int64)[inverse.reshape(-1)]
        )
    return np.asarray([sigma[Evidence(kind)] for _, kind in number]), np.concatenate(columns)


def _calls(world: World, tables: Tables, sigma: Mapping[Evidence, float]) -> tuple[np.ndarray, np.ndarray]:
    """The same for the distinct calls of the classes. Send and recv are one call, seen from its two ends."""
    number: dict[tuple, int] = {}
    of_call = []
    for c, role in enumerate(tables.classes.role.tolist()):
        program = world.programs[role]
        first = int(tables.classes.cost0[c])
        for i, call in enumerate(program.calls):
            name = "send" if call.name == "recv" else call.name
            family = world.groups[program.ports[call.port].group].family
            key = (name, call.total_bytes, call.dtype, family, int(tables.call_evidence[first + i]))
            of_call.append(number.setdefault(key, len(number)))
    return np.asarray([sigma[Evidence(key[-1])] for key in number]), np.asarray(of_call, np.int64)
