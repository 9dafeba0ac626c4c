"""Training the slowdown model, and judging it beside the baselines on kernels and sizes that it has not seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from echo_hooks.errors import UsageError
from echo_hooks.hardware.accelerator import Accelerator
from echo_hooks.overlap.features import features
from echo_hooks.overlap.formula import formula
from echo_hooks.overlap.model import TARGETS
from echo_hooks.overlap.pair import pair_of
from echo_hooks.overlap.samples import Sample, medians

FOLDS = 5
ROUNDS = 260
_PARAMETERS = {
    "max_depth": 6,
    "eta": 0.07,
    "subsample": 0.8,
    "colsample_bytree": 0.6,
    "min_child_weight": 3,
    "reg_lambda": 2.0,
    "tree_method": "hist",
    "base_score": 0.0,
    "max_bin": 64,
    "nthread": 1,  # the tables are small: more threads cost more than they bring, and would change sums
}

HOLD_OUTS = ("kernel", "size", "kernel and size")
BASELINES = ("none", "constant", "formula")


@dataclass(frozen=True)
class Data:
    """Pairs ready for training: ``rows`` and ``bare`` (the same without launch geometry) [n, features], ``base``,
    ``measured`` and ``formula`` [n, 3] in microseconds by TARGETS (NaN where not measured), ``kernel`` and ``size``:
    what hold-outs go by."""

    rows: np.ndarray
    bare: np.ndarray
    base: np.ndarray
    measured: np.ndarray
    formula: np.ndarray
    kernel: np.ndarray
    size: np.ndarray
    source: np.ndarray

    def take(self, where: np.ndarray) -> Data:
        return Data(**{name: getattr(self, name)[where] for name in self.__dataclass_fields__})

    @property
    def target(self) -> np.ndarray:
        return np.log(self.measured / self.base)


@dataclass(frozen=True)
class Score:
    """Over ``count`` pairs: median error of the overlapped duration, share within 10 %, error of the sum."""

    count: int
    median_error: float
    within_10: float
    sum_error: float


def prepare(samples: Sequence[Sample], accelerator: Accelerator) -> Data:
    """Medians of repeats and ranks as Data; UsageError where there is nothing to train on."""
    taken = [s for s in medians(samples) if s.accelerator in ("", accelerator.name)]
    if not taken:
        raise UsageError(f"no sample of {accelerator.name}")
    pairs = [pair_of(s) for s in taken]
    bare = [pair_of(s, with_launch=False) for s in taken]
    base = np.asarray([(s.base_us, s.base_us, s.call_base_us) for s in taken])
    measured = np.asarray([(s.overlap_us, s.waiting_us, s.call_overlap_us) for s in taken])
    return Data(
        rows=features(pairs, accelerator),
        bare=features(bare, accelerator),
        base=base,
        measured=measured,
        formula=base * np.asarray([formula(k, c, accelerator) for k, c in pairs]),
        kernel=np.asarray([s.kernel for s in taken]),
        size=np.asarray([s.bytes for s in taken]),
        source=np.asarray([s.source for s in taken]),
    )


def fit(data: Data, *, seed: int = 0, rounds: int = ROUNDS) -> Any:
    """A booster with an output per target, trained on every pair, of which a random half (by ``seed``) loses its launch
    geometry, so that the model learns to do without.

    A target that a pair lacks has no weight. Raises UsageError where there are too few pairs.
    """
    import xgboost

    target = data.target
    known = np.isfinite(target)
    if known.any(axis=1).sum() < 40:
        raise UsageError(f"{len(data.kernel)} pairs are too few to train on; at least 40 are needed")
    wanted = np.where(known, target, 0.0)

    def objective(predicted: np.ndarray, _: Any) -> tuple[np.ndarray, np.ndarray]:
        return (predicted.reshape(wanted.shape) - wanted) * known, known.astype(np.float64)

    without = np.random.default_rng(seed).random(len(data.kernel)) < 0.5
    matrix = xgboost.DMatrix(np.where(without[:, None], data.bare, data.rows), wanted)
    parameters = {**_PARAMETERS, "objective": "reg:squarederror", "seed": seed}
    return xgboost.train(parameters, matrix, rounds, obj=objective)


def evaluate(
    data: Data, *, seed: int = 0, extra: Data | None = None, fitter: Callable[..., Any] = fit
) -> dict[str, dict[str, dict[str, Score]]]:
    """Scores by target, hold-out and predictor ("none", "constant", "formula", "learned", "learned, no launch").

    ``extra``: pairs trained on but not judged (of a stand-in), their kernels and sizes held out with the others.
    The constant is fitted like the model: on what is not held out.
    """
    from echo_hooks.overlap.model import OverlapModel

    found: dict[str, dict[str, dict[str, Score]]] = {target: {} for target in TARGETS}
    for name in HOLD_OUTS:
        learned, bare = np.full(data.base.shape, np.nan), np.full(data.base.shape, np.nan)
        constant = np.full(data.base.shape, np.nan)
        for held, kept, kernels, sizes in _folds(data, name, seed):
            training = data.take(kept)
            if extra is not None:
                outside = ~np.isin(extra.kernel, kernels) & ~np.isin(extra.size, sizes)
                training = joined(training, extra.take(outside))
            model = OverlapModel(fitter(training, seed=seed), {})
            learned[held] = data.base[held] * model.predict_rows(data.rows[held])
            bare[held] = data.base[held] * model.predict_rows(data.bare[held])
            with np.errstate(all="ignore"):
                constant[held] = data.base[held] * np.exp(_column_medians(data.take(kept).target))
        predictors = {
            "none": data.base,
            "constant": constant,
            "formula": data.formula,
            "learned": learned,
            "learned, no launch": bare,
        }
        for t, target in enumerate(TARGETS):
            judged = np.isfinite(data.measured[:, t]) & np.isfinite(learned[:, t])
            if judged.any():
                found[target][name] = {
                    p: score(values[judged, t], data.measured[judged, t]) for p, values in predictors.items()
                }
    return found


def score(predicted: np.ndarray, measured: np.ndarray) -> Score:
    """Of predicted durations against measured ones."""
    error = np.abs(predicted / measured - 1)
    return Score(
        len(error),
        float(np.median(error)),
        float(np.mean(error <= 0.1)),
        float(predicted.sum() / measured.sum() - 1),
    )


def used_targets(scores: dict[str, dict[str, dict[str, Score]]]) -> tuple[str, ...]:
    """Targets for which the learned model beats the formula, by its median error, on every hold-out."""
    return tuple(
        target
        for target, by_hold_out in scores.items()
        if by_hold_out and all(s["learned"].median_error < s["formula"].median_error for s in by_hold_out.values())
    )


def joined(a: Data, b: Data) -> Data:
    """Both."""
    return Data(**{n: np.concatenate([getattr(a, n), getattr(b, n)]) for n in Data.__dataclass_fields__})


def _folds(data: Data, name: str, seed: int):
    """(held out, trained on, kernels held out, sizes held out) of each fold."""
    kernels, sizes = np.unique(data.kernel), np.unique(data.size)
    shuffled = np.random.default_rng(seed).permutation(kernels)
    nothing = np.zeros(0, data.size.dtype), np.zeros(0, kernels.dtype)
    if name == "size":
        for size in sizes if len(sizes) > 1 else ():
            yield data.size == size, data.size != size, nothing[1], np.asarray([size])
        return
    folds = min(FOLDS, len(kernels))
    for i in range(folds if folds > 1 else 0):
        names = shuffled[i::folds]
        of_kernel = np.isin(data.kernel, names)
        if name == "kernel":
            yield of_kernel, ~of_kernel, names, nothing[0]
        elif len(sizes) > 1:
            size = sizes[i % len(sizes)]
            yield of_kernel & (data.size == size), ~of_kernel & (data.size != size), names, np.asarray([size])


def _column_medians(values: np.ndarray) -> list[float]:
    return [float(np.median(c[np.isfinite(c)])) if np.isfinite(c).any() else math.nan for c in values.T]
