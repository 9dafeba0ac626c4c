"""Training the learned model on a profile database, and its error on shapes that it has not seen."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from math import log
from typing import Any

import numpy as np

from echo_hooks.errors import UsageError
from echo_hooks.hardware.accelerator import Accelerator
from echo_hooks.timing.classes import base_name
from echo_hooks.timing.database import Database, Measurement
from echo_hooks.timing.features import NAMES, feature_class, features, shape_of
from echo_hooks.timing.learned import LearnedModel
from echo_hooks.timing.roofline import estimate

ROUNDS = 500
LEAST_OPERATIONS = 12
"""A class with fewer operations in the hold-out keeps the roofline: nothing would be known of the model's error."""

PARAMETERS: dict[str, Any] = {
    "objective": "reg:squarederror",
    "max_depth": 7,
    "eta": 0.06,
    "subsample": 0.8,
    "colsample_bytree": 0.7,
    "min_child_weight": 2,
    "tree_method": "hist",
    "nthread": 1,
}


@dataclass(frozen=True)
class HeldOut:
    """Mean absolute relative error of one class on withheld shapes."""

    name: str
    operations: int
    shapes: int
    roofline: float
    learned: float
    weighted_roofline: float
    weighted_learned: float

    @property
    def better(self) -> bool:
        """Whether the learned model is used for the class."""
        return self.operations >= LEAST_OPERATIONS and self.learned < self.roofline


def usable(database: Database, accelerator: Accelerator) -> list[Measurement]:
    """The rows to learn from: of that device, operands out of the cache, of classes that a model is learned for."""
    return [
        row
        for row in database.rows
        if row.device == accelerator.product
        and row.condition in ("cold", "loaded")
        and row.median_us > 0.0
        and feature_class(row.signature) is not None
        and estimate(row.signature, accelerator).known
    ]


def withheld_shapes(rows: Sequence[Measurement], seed: int, classes: Collection[str] | None = None) -> set[tuple]:
    """Half of the shapes of each class, drawn with ``seed``; only of ``classes`` where given."""
    by_class: dict[str, set[tuple]] = defaultdict(set)
    for row in rows:
        if classes is None or feature_class(row.signature) in classes:
            shape = shape_of(row.signature)
            by_class[shape[0]].add(shape)
    draw = random.Random(seed)
    return {s for name in sorted(by_class) for s in draw.sample(sorted(by_class[name]), len(by_class[name]) // 2)}


def trained(database: Database, accelerator: Accelerator, seed: int = 0) -> LearnedModel:
    """The model of a whole database, for the classes in which it beats the roofline on withheld shapes; its errors and
    the versions it was made with are in ``about``."""
    import xgboost

    rows = usable(database, accelerator)
    held = hold_out(rows, accelerator, (seed, seed + 1, seed + 2))
    about = {
        "hold_out": [asdict(h) for h in held],
        "seed": seed,
        "measurements": len(rows),
        "measured_with": sorted({f"torch {r.torch}, CUDA {r.cuda}, cuDNN {r.cudnn}" for r in rows}),
        "xgboost": xgboost.__version__,
    }
    return replace(train(rows, accelerator, seed), classes=frozenset(h.name for h in held if h.better), about=about)


def train(rows: Sequence[Measurement], accelerator: Accelerator, seed: int = 0) -> LearnedModel:
    """A model of ln((measured + pause) / roofline) for every class in ``rows``; the same rows and seed give the same
    model. UsageError without rows."""
    import xgboost

    if not rows:
        raise UsageError(f"no measurement of {accelerator.product!r} to learn from: record a profile there first")
    names = sorted({base_name(row.signature.name).rstrip("_") for row in rows})
    ops = {name: number for number, name in enumerate(names)}
    table = np.array([features(r.signature, accelerator, ops, r.condition == "loaded") for r in rows], np.float32)
    target = np.array(
        [log(_measured_us(r, accelerator) / estimate(r.signature, accelerator).duration_us) for r in rows]
    )
    data = xgboost.DMatrix(table, label=target, feature_names=list(NAMES), nthread=1)
    booster = xgboost.train({**PARAMETERS, "seed": seed}, data, num_boost_round=ROUNDS)
    classes = frozenset(c for r in rows if (c := feature_class(r.signature)) is not None)
    return LearnedModel(booster, accelerator.name, accelerator.vendor, ops, classes)


def hold_out(rows: Sequence[Measurement], accelerator: Accelerator, seeds: Sequence[int] = (0, 1, 2)) -> list[HeldOut]:
    """Error by class on the withheld half of the shapes, over several draws."""
    errors: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    shapes: dict[str, set[tuple]] = defaultdict(set)
    for seed in seeds:
        withheld = withheld_shapes(rows, seed)
        model = train([r for r in rows if shape_of(r.signature) not in withheld], accelerator, seed)
        for loaded in (False, True):
            tested = [r for r in rows if shape_of(r.signature) in withheld and (r.condition == "loaded") == loaded]
            predicted = model.predict([r.signature for r in tested], accelerator, loaded=loaded)
            for row in tested:
                name, measured_us = feature_class(row.signature) or "", _measured_us(row, accelerator)
                roofline_us = estimate(row.signature, accelerator).duration_us
                learned_us = predicted.get(row.signature, roofline_us)
                errors[name].append(
                    (abs(roofline_us / measured_us - 1), abs(learned_us / measured_us - 1), measured_us)
                )
                shapes[name].add(shape_of(row.signature))
    found = []
    for name, values in sorted(errors.items()):
        roofline, learned, weight = np.array(values).T
        found.append(
            HeldOut(
                name,
                len(values) // max(len(seeds), 1),
                len(shapes[name]),
                float(roofline.mean()),
                float(learned.mean()),
                float(roofline @ weight / weight.sum()),
                float(learned @ weight / weight.sum()),
            )
        )
    return found


def _measured_us(row: Measurement, accelerator: Accelerator) -> float:
    """With the pause before the next kernel, as the roofline counts it."""
    return row.median_us + accelerator.launch_overhead_us
