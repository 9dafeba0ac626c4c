"""The learned model: how much longer than the roofline an operation takes, by gradient-boosted trees.

    duration = roofline * exp(trees(features)), never below what the device's peaks allow

On disk two files: NAME.ubj (XGBoost's own binary JSON) and NAME.json (schema: feature names, numbers of operations,
the classes that the model is used for, its errors on the hold-out, versions). Both are read as data; nothing is run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from math import exp, isfinite
from pathlib import Path
from typing import Any

import numpy as np

from echo_hooks.errors import UsageError
from echo_hooks.graph.ops import OpSignature
from echo_hooks.hardware.accelerator import Accelerator, accelerator_names, load_accelerator
from echo_hooks.timing.classes import PRODUCTS
from echo_hooks.timing.features import NAMES, feature_class, features
from echo_hooks.timing.matmul import peak_rate
from echo_hooks.timing.roofline import attention_work, estimate

FORMAT = 1
MAX_FILE_BYTES = 64 << 20
LONGEST_FACTOR = 30.0
"""A prediction this far from the roofline is none."""


@dataclass(frozen=True)
class LearnedModel:
    """``accelerator``: name of the one it was learned on. ``classes``: those in which it beat the roofline on shapes
    that it had not seen. ``about``: errors and versions, as in the JSON file."""

    booster: Any
    accelerator: str
    vendor: str
    ops: dict[str, int]
    classes: frozenset[str]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def errors(self) -> dict[str, float]:
        """Mean absolute relative error on withheld shapes of each class that the model is used for."""
        return {h["name"]: h["learned"] for h in self.about.get("hold_out", []) if h["name"] in self.classes}

    def predict(
        self, signatures: Sequence[OpSignature], accelerator: Accelerator, *, loaded: bool = False
    ) -> dict[OpSignature, float]:
        """Durations in microseconds of those signatures that the model is used for; the others are left out."""
        import xgboost

        chosen = [s for s in signatures if feature_class(s) in self.classes]
        if not chosen:
            return {}
        table = np.array([features(s, accelerator, self.ops, loaded) for s in chosen], np.float32)
        factors = self.booster.predict(xgboost.DMatrix(table, feature_names=list(NAMES), nthread=1))
        found = {}
        for signature, factor in zip(chosen, factors.tolist()):
            if isfinite(factor) and abs(factor) < np.log(LONGEST_FACTOR):
                modelled = estimate(signature, accelerator).duration_us * exp(factor)
                found[signature] = max(modelled, floor_us(signature, accelerator))
        return found


def floor_us(signature: OpSignature, accelerator: Accelerator) -> float:
    """What no kernel can beat: its products at the datasheet's peak, its results beyond the cache at full bandwidth."""
    name = feature_class(signature)
    arithmetic_us = 0.0
    if name in PRODUCTS:
        flops = attention_work(signature)[0] if name != "gemm" else float(signature.flops)
        arithmetic_us = flops / peak_rate(signature, accelerator)[0] * 1e6
    beyond = max(signature.bytes_written - accelerator.l2_bytes, 0)
    return max(arithmetic_us, beyond / accelerator.memory_bandwidth_bytes_per_s * 1e6)


# ---- files ----


def save_model(model: LearnedModel, path: Path) -> None:
    """Write ``path``.ubj and ``path``.json."""
    raw = bytes(model.booster.save_raw("ubj"))
    path.with_suffix(".ubj").write_bytes(raw)
    schema = {
        "format": FORMAT,
        "sha256": sha256(raw).hexdigest(),
        "features": list(NAMES),
        "accelerator": model.accelerator,
        "vendor": model.vendor,
        "ops": model.ops,
        "classes": sorted(model.classes),
        "about": model.about,
    }
    path.with_suffix(".json").write_text(json.dumps(schema, indent=1, allow_nan=False) + "\n")


def load_model(trees: Path | Traversable, schema: Path | Traversable) -> LearnedModel:
    """A saved model; UsageError says what is missing or does not fit."""
    import xgboost

    try:
        raw, text = trees.read_bytes(), schema.read_text()
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from None
    if max(len(raw), len(text)) > MAX_FILE_BYTES:
        raise UsageError(f"{trees}: larger than {MAX_FILE_BYTES} bytes")
    try:
        said = json.loads(text)
        if said["format"] != FORMAT or said["features"] != list(NAMES):
            raise UsageError(f"{schema}: learned for other features than this Echo has; train it anew")
        # Damaged bytes end the process inside XGBoost: they must not get that far.
        if sha256(raw).hexdigest() != said["sha256"]:
            raise UsageError(
                f"{trees}: not the trees that {schema.name} was written with; it is damaged or another model"
            )
        booster = xgboost.Booster({"nthread": 1})
        booster.load_model(bytearray(raw))
        if booster.num_features() != len(NAMES):
            raise ValueError("other features than its schema says")
        ops = {str(name): int(number) for name, number in said["ops"].items()}
        return LearnedModel(
            booster,
            str(said["accelerator"]),
            str(said["vendor"]),
            ops,
            frozenset(map(str, said["classes"])),
            said["about"],
        )
    except (xgboost.core.XGBoostError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UsageError(f"{trees}: no learned model ({str(error).splitlines()[0][:120]})") from None


def shipped_model(accelerator: Accelerator) -> LearnedModel | None:
    """The accelerator's own model, else that of another one of its vendor's, else None."""
    names = [accelerator.name, *accelerator_names()]
    for name in names:
        if not (files("echo_hooks.timing.profiles") / f"{name}.ubj").is_file():
            continue
        if name == accelerator.name or load_accelerator(name).vendor == accelerator.vendor:
            return _shipped(name)
    return None


@cache
def _shipped(name: str) -> LearnedModel:
    room = files("echo_hooks.timing.profiles")
    return load_model(room / f"{name}.ubj", room / f"{name}.json")
