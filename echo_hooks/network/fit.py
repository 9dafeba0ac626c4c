"""Fits the multipliers of a calibration to measured sweeps.

A duration is linear in its multipliers, so the fit is a least-squares problem in relative errors, with a robust loss
(Huber, 1964: errors beyond a tenth count linearly) and a prior: what the data do not say stays at NCCL's own numbers,
or at what the node's own fit found for hops inside the node. Break points are not fitted; they are NCCL's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product

import numpy as np

from echo_hooks.errors import UsageError
from echo_hooks.hardware.cluster import Cluster
from echo_hooks.network.calibration import (
    STOCK,
    UNSEEN_NET_CHANNEL_US,
    UNSEEN_NET_HOP,
    Calibration,
    Key,
    Scaling,
    Support,
    scope_of,
    sends_like_rings,
)
from echo_hooks.network.durations import PART_NAMES
from echo_hooks.network.measured import launch_floor_us, model_of, plan_of
from echo_hooks.network.nccl_tuning_log import TuningTable
from echo_hooks.network.sweeps import Sweep

# In the order of durations.Parts, whose parts they multiply.
MULTIPLIERS = tuple(field.name for field in fields(Scaling))
# How far a multiplier is expected to lie from its prior, and what one such step costs: as much as _RIDGE points that
# are off by all of their value.
_SPREAD = {
    "base": 0.5, "hop": 0.5, "net_hop": 0.5, "channel_us": 1.0, "transfer": 0.5, "copy": 0.3, "ramp": 0.2,
}  # fmt: skip
_RIDGE = 0.002
_HUBER = 0.1
_LEAST = {"channel_us": 0.0, "copy": 0.0, "ramp": 0.0}  # the others: a tenth of the prior
# Errors on sweeps that were held out, over those of sweeps that were fitted (bench/network_accuracy.py).
_WIDER = 1.5
_FEWEST_POINTS = 8
_FEWEST_OF_A_PROTOCOL = 3
_FEWEST_OF_A_COLLECTIVE = 4


@dataclass(frozen=True)
class Row:
    """One measured point: kernel time in us, and the parts of the model's duration."""

    key: Key
    time_us: float
    parts: tuple[float, ...]
    bytes: int
    sweep: Sweep


@dataclass(frozen=True)
class Fit:
    """``rows``: what it was fitted to. ``unused``: points left out because the host's launches, not the kernel, set
    their time. ``too_few``: what ran in the sweeps, but too rarely to fit."""

    calibration: Calibration
    rows: list[Row]
    unused: int
    too_few: tuple[Key, ...]


def fit(
    sweeps: Sequence[Sweep],
    cluster: Cluster,
    *,
    nccl_version: str = "",
    name: str = "fitted",
    source: str = "",
    prior: Calibration | None = None,
    tables: Sequence[TuningTable] = (),
    fixed: Collection[str] = (),
) -> Fit:
    """Multipliers for everything that ``sweeps`` ran.

    ``cluster``: what they ran on (as many of its nodes as each needs). ``nccl_version``: of sweeps that do not say
    theirs. ``prior``: what to stay at without data. ``tables``: that the library printed, which say what ran.
    ``fixed``: multipliers that stay at their prior whatever the data say, for sweeps that cannot tell them apart (one
    group size does not tell ``transfer`` from ``copy``).
    Raises UsageError where there is too little to fit from, and for sweeps of several versions or accelerators.
    """
    version = _one_of(sweeps, "versions of NCCL", lambda sweep: sweep.nccl_version or nccl_version)
    _one_of([s for s in sweeps if s.accelerator], "accelerators", lambda sweep: sweep.accelerator)
    rows, unused = _rows(sweeps, cluster, nccl_version, Calibration(tables=tuple(tables)))
    if len(rows) < _FEWEST_POINTS:
        raise UsageError(
            f"{sweeps[0].where + ': ' if sweeps else ''}{len(rows)} usable points in {len(sweeps)} "
            f"sweep{'s' * (len(sweeps) != 1)} of 2 ranks or more"
            + (f", {unused} more set by the host's launches" if unused else "")
            + f"; a calibration needs at least {_FEWEST_POINTS}"
        )
    scalings: dict[Key, Scaling] = dict(prior.scalings) if prior else {}
    identified: dict[Key, tuple[str, ...]] = {}
    for scope, sends in product(("node", "network"), (False, True)):
        here = [row for row in rows if row.key[0] == scope and (row.key[1] == "p2p") == sends]
        counts = {key: sum(row.key == key for row in here) for key in {row.key for row in here}}
        keys = sorted(key for key, count in counts.items() if count >= _FEWEST_OF_A_PROTOCOL)
        here = [row for row in here if row.key in keys]
        if here:
            priors = {key: _prior(key, scalings, prior) for key in keys}
            found, known = _solve(here, keys, priors, fixed)
            scalings |= found
            identified |= known
            for rows_of, key in _by_collective(here):
                found, known = _solve(rows_of, [key], {key: scalings[(*key[:3], "")]}, fixed, narrow=True)
                scalings |= found
                identified |= known
    calibration = Calibration(
        name=name,
        scalings=scalings,
        support=(dict(prior.support) if prior else {}) | _support(rows, scalings, identified),
        accelerator=cluster.accelerator.name,
        nccl_version=version,
        source=source or ", ".join(dict.fromkeys(sweep.source for sweep in sweeps)),
        tables=tuple(tables),
    )
    return Fit(calibration, rows, unused, tuple(sorted({row.key for row in rows} - set(identified))))


def _one_of(sweeps: Sequence[Sweep], what: str, of: Callable[[Sweep], str]) -> str:
    """What all ``sweeps`` have in common ("" if nothing); UsageError naming two that differ."""
    if not sweeps:
        return ""
    first = sweeps[0]
    for sweep in sweeps:
        if of(sweep) != of(first):
            raise UsageError(
                f"{sweep.where}: {of(sweep) or 'unknown'}, but {first.where}: {of(first) or 'unknown'}: different "
                f"{what} behave differently, so fit them one at a time"
            )
    return of(first)


def _support(
    rows: list[Row], scalings: Mapping[Key, Scaling], identified: Mapping[Key, tuple[str, ...]]
) -> dict[Key, Support]:
    result = {}
    for key, known in identified.items():
        here = [row for row in rows if row.key[:3] == key[:3] and key[3] in ("", _priced_as(row.sweep))]
        multipliers = np.array([getattr(scalings[key], name) for name in MULTIPLIERS])
        ratio = np.array([row.time_us / float(np.dot(row.parts, multipliers)) for row in here])
        low, high = 1 + _WIDER * (np.quantile(ratio, [0.1, 0.9]) - 1)
        result[key] = Support(
            points=len(here),
            error=float(np.mean(np.abs(1 / ratio - 1))),
            band=(min(float(low), 0.95), max(float(high), 1.05)),
            most_ranks=max(row.sweep.ranks for row in here),
            most_nodes=max(row.sweep.nodes for row in here),
            identified=known,
        )
    return result


def _prior(key: Key, fitted: Mapping[Key, Scaling], prior: Calibration | None) -> Scaling:
    scope, algorithm, protocol, _ = key
    stay = prior.scalings.get(key) if prior else None
    if stay is not None:
        return stay
    if algorithm == "p2p":
        ring, ring_ll = (fitted.get((scope, "ring", p, "")) for p in (protocol, "ll"))
        return sends_like_rings(ring, ring_ll or STOCK) if ring else STOCK
    node = fitted.get(("node", algorithm, protocol, ""))
    if scope == "node":
        return STOCK
    start = replace(STOCK, net_hop=UNSEEN_NET_HOP[protocol], channel_us=UNSEEN_NET_CHANNEL_US)
    return replace(start, hop=node.hop) if node else start


def _by_collective(rows: list[Row]) -> Iterator[tuple[list[Row], Key]]:
    """The collectives of each algorithm and protocol that ran more than one of them."""
    groups: dict[Key, dict[str, list[Row]]] = {}
    for row in rows:
        groups.setdefault(row.key, {}).setdefault(_priced_as(row.sweep), []).append(row)
    for key, by_collective in groups.items():
        for collective, here in by_collective.items():
            if len(by_collective) > 1 and len(here) >= _FEWEST_OF_A_COLLECTIVE:
                named = (*key[:3], collective)
                yield [replace(row, key=named) for row in here], named


def _priced_as(sweep: Sweep) -> str:
    """The collective whose multipliers the model takes: links are full duplex, so an exchange is a send."""
    return "send" if sweep.collective == "exchange" else sweep.collective


def _rows(sweeps: Sequence[Sweep], cluster: Cluster, nccl_version: str, stock: Calibration) -> tuple[list[Row], int]:
    rows, unused = [], 0
    for sweep in sweeps:
        if sweep.ranks < 2:
            continue
        model, ranks = model_of(sweep, cluster, stock, nccl_version)
        gap = model.cluster.accelerator.launch_overhead_us if sweep.clock == "stream" else 0.0
        for planned in plan_of(sweep, model, ranks):
            key = (scope_of(sweep.nodes), planned.algorithm, planned.protocol, "")
            table = np.stack([getattr(planned.parts, part) for part in PART_NAMES], axis=1)
            for i, where in enumerate(planned.where.tolist()):
                size, time = sweep.points[where]
                if time < 1.25 * launch_floor_us(sweep) or time <= gap:
                    unused += 1
                    continue
                rows.append(Row(key, time - gap, tuple(table[i].tolist()), size, sweep))
    return rows, unused


def _solve(
    rows: list[Row], keys: list[Key], priors: Mapping[Key, Scaling], fixed: Collection[str], *, narrow: bool = False
) -> tuple[dict[Key, Scaling], dict[Key, tuple[str, ...]]]:
    """One problem for all keys, because they share the cost of a channel. ``narrow``: stay near the priors, with the
    cost of a channel as it is."""
    if narrow:
        fixed = {*fixed, "channel_us"}
    shared = MULTIPLIERS.index("channel_us")
    own = [i for i in range(len(MULTIPLIERS)) if i != shared]
    columns = {(key, i): k * len(own) + j for k, key in enumerate(keys) for j, i in enumerate(own)}
    count = len(keys) * len(own) + 1
    columns |= {(key, shared): count - 1 for key in keys}
    start, spread, least = np.empty(count), np.empty(count), np.empty(count)
    for (key, i), column in columns.items():
        multiplier = MULTIPLIERS[i]
        start[column] = getattr(priors[key], multiplier)
        spread[column] = _SPREAD[multiplier] * (0.5 if narrow else 1.0)
        if multiplier in fixed:
            spread[column] = 1e-6
        least[column] = _LEAST.get(multiplier, 0.1 * start[column])
    design = np.zeros((len(rows), count))
    for r, row in enumerate(rows):
        for i, part in enumerate(row.parts):
            design[r, columns[row.key, i]] += part / row.time_us
    value, information = _robust(design, start, spread, least)
    known = information < 0.5  # variance left, of the prior's
    scalings, identified = {}, {}
    for key in keys:
        scalings[key] = Scaling(**{m: float(value[columns[key, i]]) for i, m in enumerate(MULTIPLIERS)})
        identified[key] = tuple(m for i, m in enumerate(MULTIPLIERS) if known[columns[key, i]])
    return scalings, identified


def _robust(
    design: np.ndarray, start: np.ndarray, spread: np.ndarray, least: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Iteratively reweighted least squares of design @ value = 1, with bounds from below by an active set."""
    scaled = design * spread
    target = 1.0 - design @ start
    step = np.zeros(len(start))
    for _ in range(30):
        error = np.abs(scaled @ step - target)
        weight = np.where(error < _HUBER, 1.0, _HUBER / np.maximum(error, 1e-9))
        normal = scaled.T @ (weight[:, None] * scaled) + _RIDGE * np.eye(len(start))
        right = scaled.T @ (weight * target)
        floor = (least - start) / spread
        held = np.zeros(len(start), bool)
        step = floor.copy()
        for _ in range(len(start)):
            free = ~held
            step[held] = floor[held]
            step[free] = np.linalg.solve(
                normal[np.ix_(free, free)], right[free] - normal[np.ix_(free, held)] @ step[held]
            )
            below = free & (step < floor - 1e-12)
            if not below.any():
                break
            held |= below
    return start + spread * step, _RIDGE * np.diag(np.linalg.inv(normal))
