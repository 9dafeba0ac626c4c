"""The time of one local operation from the best source at hand: measured on this kind of device, learned, roofline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path

from echo_hooks.errors import UsageError
from echo_hooks.graph.ops import OpSignature
from echo_hooks.graph.program import Evidence
from echo_hooks.hardware.accelerator import Accelerator
from echo_hooks.timing.classes import PRODUCTS, op_class
from echo_hooks.timing.database import Database, Measurement, key_of, read_database
from echo_hooks.timing.learned import LearnedModel, shipped_model
from echo_hooks.timing.roofline import estimate

TIMINGS = ("auto", "execute", "profile", "model")
"""Values of ``--timing``. Where nothing is executed, "auto" is "profile"."""


@dataclass(frozen=True)
class Price:
    """``duration_us``: on a rested device. ``source``: what the evidence rests on. ``slows``: products, which take
    longer where their power lowers the device's clock (timing.clock)."""

    duration_us: float
    evidence: Evidence
    source: str = ""
    slows: bool = False


class Pricing:
    """Prices operations for one accelerator, each distinct one once.

    ``databases``: looked up in order, where they have measurements of the accelerator's product. ``model``: for what
    they lack, where it beats the roofline; None for the roofline alone.
    """

    def __init__(
        self, accelerator: Accelerator, databases: Sequence[Database] = (), model: LearnedModel | None = None
    ) -> None:
        self.accelerator = accelerator
        self.model = model
        self.versions: Counter[tuple[str, str, str]] = Counter()
        self.notes: list[str] = []
        self._tables = [_by_key(database, accelerator.product) for database in databases]
        self._prices: dict[OpSignature, Price] = {}

    def prepare(self, signatures: Iterable[OpSignature]) -> None:
        """Price many at once: a learned model answers a batch as fast as one."""
        missing = [s for s in dict.fromkeys(signatures) if s not in self._prices]
        unmeasured = []
        for signature in missing:
            found = self._measured(signature)
            if found is None:
                unmeasured.append(signature)
            else:
                self._prices[signature] = found
        learned = self.model.predict(unmeasured, self.accelerator) if self.model is not None and unmeasured else {}
        for signature in unmeasured:
            self._prices[signature] = self._modelled(signature, learned.get(signature))

    def price(self, signature: OpSignature) -> Price:
        """Duration alone on the device, the pause before the next kernel included."""
        if signature not in self._prices:
            self.prepare([signature])
        return self._prices[signature]

    def _measured(self, signature: OpSignature) -> Price | None:
        if not signature.call:
            return None
        key = key_of(signature)
        pause_us = self.accelerator.launch_overhead_us
        for table in self._tables:
            rows = table.get(key)
            if rows is not None:
                row = min(rows.values(), key=lambda r: _PREFERRED[r.condition])
                self.versions[row.versions] += 1
                slows = row.condition == "cold" and is_product(signature)
                return Price(row.median_us + pause_us, Evidence.PROFILED, "database", slows)
        return None

    def _modelled(self, signature: OpSignature, learned_us: float | None) -> Price:
        roofline = estimate(signature, self.accelerator)
        if not roofline.known:
            return Price(roofline.duration_us, Evidence.ASSUMED, "its bytes alone")
        if learned_us is not None:
            return Price(learned_us, Evidence.MODELLED, "learned model", is_product(signature))
        # The roofline's shares of the peak are those of kernels timed in training.
        return Price(roofline.duration_us, Evidence.MODELLED, "roofline")


_PREFERRED = {"cold": 0, "loaded": 1, "warm": 2}


def is_product(signature: OpSignature) -> bool:
    """Whether the op is made of matrix products, which draw more power than a device may."""
    found = op_class(signature.name)
    return found is not None and found.name in PRODUCTS


def _by_key(database: Database, device: str) -> dict[tuple, dict[str, Measurement]]:
    """The measurements of each operation on that device by condition; of several library versions the last counts."""
    found: dict[tuple, dict[str, Measurement]] = {}
    for row in database.rows:
        if row.device == device:
            found.setdefault(key_of(row.signature), {})[row.condition] = row
    return found


def recorded_host_speed(accelerator: Accelerator) -> dict[str, float]:
    """Of the hosts on which the shipped database was recorded, the fastest of each loop (capture.host_speed), in
    microseconds; {} without a database."""
    found: dict[str, float] = {}
    for database in shipped_databases(accelerator):
        for recording in database.recordings:
            for name, us in (recording.get("host_speed") or {}).items():
                found[name] = min(float(us), found.get(name, float(us)))
    return found


def load_pricing(accelerator: Accelerator, timing: str = "auto", profiles: Sequence[Path] = ()) -> Pricing:
    """``timing``: "profile" (databases, then the model), "model" (without databases), or "auto" and "execute", where
    nothing was executed as "profile". ``profiles``: a user's databases, looked up before the shipped one."""
    if timing not in TIMINGS:
        raise UsageError(f"timing {timing!r}: known are {', '.join(TIMINGS)}")
    databases = [] if timing == "model" else [*map(read_database, profiles), *shipped_databases(accelerator)]
    try:
        return Pricing(accelerator, databases, shipped_model(accelerator))
    except ModuleNotFoundError as error:
        pricing = Pricing(accelerator, databases)
        pricing.notes.append(
            f"no learned model, as {error.name} is not installed: what databases lack is by the roofline"
        )
        return pricing


def shipped_databases(accelerator: Accelerator) -> list[Database]:
    """The database that comes with Echo for the accelerator; [] where none does."""
    name = f"{accelerator.name}.parquet"
    return [_read_shipped(name)] if (files("echo_hooks.timing.profiles") / name).is_file() else []


@cache
def _read_shipped(name: str) -> Database:
    with as_file(files("echo_hooks.timing.profiles") / name) as path:
        return read_database(path)
