"""A trained slowdown model: one XGBoost booster with three outputs, in one file that says what it is."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echo_hooks.errors import UsageError
from echo_hooks.hardware.accelerator import Accelerator
from echo_hooks.overlap.features import NAMES, VERSION, features
from echo_hooks.overlap.pair import Call, Kernel

TARGETS = ("kernel", "waiting", "call")
"""Outputs, each ln(slowdown): of the kernel while the call moves data, of the kernel while the call waits, of the
call."""

SLACK = 1.5
_ATTRIBUTE = "echo_overlap"
MOST_BYTES = 256 << 20


class OverlapModel:
    """``about``: what the model was trained on, how it did on the hold-outs, and for which ``targets`` it is to be
    used in place of the formula."""

    def __init__(self, booster: Any, about: dict[str, Any]):
        self._booster = booster
        self.about = about

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(t for t in TARGETS if t in self.about["targets"])

    def covers(self, call: Call) -> bool:
        """Whether the call is like those that the model was trained on: as many channels, up to a factor of SLACK, and
        bytes, or more of them. Trees cannot tell what lies beyond."""
        least, most = self.about["channels"]
        return least / SLACK <= call.channels <= most * SLACK and call.bytes * SLACK >= self.about["sizes"][0]

    def predict(self, pairs: Sequence[tuple[Kernel, Call]], accelerator: Accelerator) -> np.ndarray:
        """Factors [n, 3] in the order of TARGETS, whatever ``targets`` says."""
        return self.predict_rows(features(pairs, accelerator))

    def predict_rows(self, rows: np.ndarray) -> np.ndarray:
        """The same from rows of NAMES."""
        if not len(rows):
            return np.ones((0, len(TARGETS)))
        found = self._booster.inplace_predict(rows, validate_features=False)
        return _whole_kernels(rows, np.exp(np.asarray(found, np.float64).reshape(len(rows), len(TARGETS))))


_FILLS, _RUN, _CALL_RUN = (NAMES.index(name) for name in ("fills", "ln_run_us", "call_ln_us"))


def _whole_kernels(rows: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """``factors`` with the call's such that it lasts a whole number of slowed kernels, or half of one, where the kernel
    fills the device: a call finds SMs only when a kernel ends, or its last blocks have begun.

    Trees answer with the mean over pairs on both sides of such a step, which no pair has. A call is left alone where
    this would make it faster than alone.
    """
    kernel, call = TARGETS.index("kernel"), TARGETS.index("call")
    alone = np.exp(rows[:, _CALL_RUN].astype(np.float64) - rows[:, _RUN]) / factors[:, kernel]
    kernels = alone * factors[:, call]
    whole = np.where(kernels < math.sqrt(0.5), 0.5, np.rint(kernels)) / alone
    found = factors.copy()
    found[:, call] = np.where((rows[:, _FILLS] > 0.0) & (whole >= 1.0), whole, factors[:, call])
    return found


def save(path: Path, booster: Any, about: dict[str, Any]) -> None:
    """Write a model as UBJ, whole and then renamed; features, versions and ``about`` go with it."""
    import xgboost

    said = {"features": VERSION, "names": list(NAMES), "xgboost": xgboost.__version__, **about}
    booster.set_attr(**{_ATTRIBUTE: json.dumps(said)})
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(bytes(booster.save_raw("ubj")))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path) -> OverlapModel:
    """Read a model by its content, UBJ or JSON, whatever its name.

    Raises UsageError with the reason: no file, a pickle, XGBoost's old binary, damaged, no slowdown model, trained on
    other features.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"{path}: {path.stat().st_size} bytes are too many for a slowdown model")
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    return loads(raw, str(path))


def loads(raw: bytes, name: str) -> OverlapModel:
    """The same from the file's content."""
    kind = _kind(raw)
    if kind:
        raise UsageError(f"{name}: {kind}")
    import xgboost

    booster = xgboost.Booster({"nthread": 1})
    try:
        booster.load_model(bytearray(raw))
        said = booster.attr(_ATTRIBUTE)
    except (xgboost.core.XGBoostError, ValueError, TypeError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise UsageError(f"{name}: XGBoost {xgboost.__version__} cannot read this model ({reason})") from None
    if said is None:
        raise UsageError(f"{name}: an XGBoost model, but not of echo-sim overlap train")
    try:
        about = json.loads(said)
        version, names = about["features"], about["names"]
        known = set(about["targets"]) <= set(TARGETS) and len(about["channels"]) == 2 and bool(about["sizes"])
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{name}: its description is damaged; train it again") from None
    if version != VERSION or names != list(NAMES) or not known:
        raise UsageError(
            f"{name}: trained on features of version {version}, this Echo has {VERSION}; train it again with"
            " echo-sim overlap train"
        )
    return OverlapModel(booster, about)


def _kind(raw: bytes) -> str:
    """What the file is where it is no model to be read, "" where it may be one (case 119: names lie)."""
    if not raw:
        return "empty"
    if raw[:1] == b"{":  # JSON, and UBJ with its typed keys
        return ""
    if raw[:1] == b"\x80" or raw[:2] in (b"(d", b"cc"):
        return "a pickle, which is never loaded; save the model as UBJ"
    if raw[:4] == b"binf" or b"gbtree" in raw[:4096] or b"gblinear" in raw[:4096]:
        return "XGBoost's old binary format, whatever its name: load it in XGBoost 3.0 or older and save it as UBJ"
    return "neither UBJ nor JSON, so no XGBoost model; echo-sim overlap train writes UBJ"
