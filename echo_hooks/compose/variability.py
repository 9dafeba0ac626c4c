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

SHARED = 0.5
"""Share of that variance which all kernels (and likewise all calls) of one evidence have in common: a model that is too
slow on one product is likely too slow on the next. Assumed; with 0 the errors of many operations would average out."""

HOST_SIGMA = 0.20
"""The same for host times as a whole: they were measured, but on the machine that traced, not on the cluster's hosts.
Assumed too."""

FEWEST_SAMPLES = 8
"""With fewer there is nothing to read a P10 and a P90 from."""

NOISY_RECORDS = 3_000_000
"""Records of the whole world, over all copies, up to which noise is drawn for every rank by itself."""


@dataclass(frozen=True)
class Variability:
    """At most ``samples`` simulations with other inputs, drawn from ``seed``.

    Every distinct operation and call gets a factor, equal on all ranks (an error of its model), log-normal with the
    ``sigma`` of its evidence, half of its variance (SHARED) in common with the others of that evidence; the host times
    of all ranks get one together, with ``host_sigma``; and every single kernel one more, independent, with sigma
    ``jitter`` (noise of the machine). The noise is each rank's own in worlds of up to NOISY_RECORDS records; in larger
    ones it is drawn per simulated class, and the slowest of many equal ranks does not show. ``most_records``: take
    fewer samples where all of them together would simulate more records than this, and give no band if that leaves
    under FEWEST_SAMPLES.
    """

    samples: int = 32
    seed: int = 0
    jitter: float = 0.0
    sigma: Mapping[Evidence, float] = field(default_factory=lambda: INPUT_SIGMA)
    host_sigma: float = HOST_SIGMA
    most_records: int | None = None

    def affordable(self, records: int) -> int:
        """Samples to take where one simulates ``records`` records; 0 for no band."""
        if self.most_records is None:
            return self.samples
        samples = min(self.samples, self.most_records // max(records, 1))
        return samples if samples >= min(FEWEST_SAMPLES, self.samples) else 0


def band(
    world: World,
    partition: Partition,
    tables: Tables,
    repeat: int,
    host_launch_us: float,
    step_time_us: float,
    variability: Variability,
) -> Band | None:
    """P10, P50 and P90 of ``step_time_us``: the spread of the samples' periods around that of the undisturbed inputs,
    both with constant durations. None where the samples would take too long (``Variability.most_records``)."""
    samples = variability.affordable(repeat * int(tables.programs.n[tables.classes.role].sum()))
    if not samples:
        return None
    rng = np.random.default_rng(variability.seed)
    host = np.exp(variability.host_sigma * np.random.default_rng([variability.seed, 1]).standard_normal(samples))
    operations, of_record = _operations(world, variability.sigma)
    calls, of_call = _calls(world, tables, variability.sigma)
    undisturbed = _period(world, partition, tables, repeat, host_launch_us)
    ratios = []
    for sample in range(samples):
        run_us = tables.programs.run_us * np.exp(_errors(rng, operations))[of_record]
        cost_us = tables.classes.cost_us * np.exp(_errors(rng, calls))[of_call]
        disturbed = Tables(
            tables.programs._replace(run_us=run_us, host_us=tables.programs.host_us * host[sample]),
            tables.classes._replace(cost_us=cost_us),
            tables.channels,
            tables.ends,
            tables.missing,
            tables.call_evidence,
            tables.call_latency_us,
        )
        launch_us = host_launch_us * float(host[sample])
        period = _period(
            world, partition, disturbed, repeat, launch_us, variability.jitter, variability.seed + 1 + sample
        )
        ratios.append(period / undisturbed if undisturbed > 0 else 1.0)
    p10, p50, p90 = (float(x) * step_time_us for x in np.quantile(ratios, [0.1, 0.5, 0.9]))
    return Band(p10, p50, p90, _basis(variability, samples, len(partition.representative) == world.world_size))


def _errors(rng: np.random.Generator, sigma: np.ndarray) -> np.ndarray:
    """Logarithms of one factor each; those of one sigma are of one evidence, and have SHARED of their variance in
    common."""
    _, kind = np.unique(sigma, return_inverse=True)
    common = rng.standard_normal(int(kind.max(initial=-1)) + 1)[kind.reshape(-1)]
    return sigma * (np.sqrt(SHARED) * common + np.sqrt(1.0 - SHARED) * rng.standard_normal(len(sigma)))


def _basis(variability: Variability, samples: int, every_rank: bool) -> str:
    named = (Evidence.MEASURED, Evidence.PROFILED, Evidence.MODELLED, Evidence.ASSUMED)
    sigmas = ", ".join(f"{100 * variability.sigma[kind]:g} % {kind.name.lower()}" for kind in named)
    text = (
        f"P10 and P90 of the step time are of {samples} simulations (seed {variability.seed}); in each every operation"
        f" and call is off by a log-normal factor of sigma {sigmas} (half the variance in common),"
        " and all host times"
        f" together by one of sigma {100 * variability.host_sigma:g} % (assumed figures)"
    )
    if variability.jitter > 0.0:
        whose = "each rank's own" if every_rank else "one for all ranks of a class, as the world is large"
        text += f", and every single kernel by another of sigma {100 * variability.jitter:g} % ({whose})"
    return text


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
