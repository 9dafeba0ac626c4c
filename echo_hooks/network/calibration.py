"""How far real durations are from NCCL's own numbers: a few multipliers per algorithm and protocol, in TOML files."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from echo_hooks.errors import UsageError
from echo_hooks.network.nccl_tables import ALGORITHMS, PROTOCOLS
from echo_hooks.network.nccl_tuning_log import FUNCTIONS, TuningTable

FORMAT = 1
MAX_FILE_BYTES = 1 << 20
# Measured over predicted, tenth and ninetieth percentile, where nothing was calibrated: NCCL's own numbers against the
# public sweeps of A100, H100, H200 and B200 (bench/network_accuracy.py).
STOCK_BAND = (0.75, 1.6)
# And where the node was calibrated, but nothing was measured between nodes.
UNSEEN_NETWORK_BAND = (0.8, 1.6)
# Hops between nodes in LL and LL128 take about twice what NCCL counts on: 1.9 on a public A100 cluster (32 GPUs,
# coreweave/nccl-tests), 2.5 on two H200 nodes (kubernetes-sigs/dranet).
UNSEEN_NET_HOP = {"ll": 2.0, "ll128": 2.0, "simple": 1.0}
# And each channel takes the proxy thread's time once: 1.5 us in the 16-GPU log of NetX-lab/Echo; NCCL counts on 1 us
# per posted step on Intel hosts and 2 us on AMD (src/graph/tuning.cc).
UNSEEN_NET_CHANNEL_US = 1.5

Key = tuple[str, str, str, str]  # scope ("node" or "network"), algorithm, protocol, collective ("": any)


@dataclass(frozen=True)
class Scaling:
    """Multiplies the parts of a duration (``durations.Parts``); ``channel_us`` is us per channel. The defaults are
    NCCL's own numbers; of a rank's own share, for which NCCL has none, half is taken to hide behind the links."""

    base: float = 1.0
    hop: float = 1.0
    net_hop: float = 1.0
    channel_us: float = 0.0
    transfer: float = 1.0
    copy: float = 0.5
    ramp: float = 0.0


@dataclass(frozen=True)
class Support:
    """What a scaling was fitted from: ``points``, with mean relative ``error``, on up to ``most_ranks`` ranks in
    ``most_nodes`` nodes. ``band``: measured over predicted, tenth and ninetieth percentile. ``identified``: the
    multipliers the data speak of; the others are at their prior."""

    points: int
    error: float
    band: tuple[float, float]
    most_ranks: int
    most_nodes: int
    identified: tuple[str, ...]


STOCK = Scaling()


@dataclass(frozen=True)
class Calibration:
    """``scalings``: what is in it neither for its collective nor for any stays at NCCL's own numbers, or at the
    node's. ``nccl_version``: that was measured ("" if unknown). ``source``: where the measurements are from.
    ``tables``: that the library printed, which decide what runs on communicators of their size."""

    name: str = "stock"
    scalings: Mapping[Key, Scaling] = field(default_factory=dict)
    support: Mapping[Key, Support] = field(default_factory=dict)
    accelerator: str = ""
    nccl_version: str = ""
    source: str = "NCCL's own numbers"
    tables: tuple[TuningTable, ...] = ()

    def scaling(self, nodes: int, algorithm: str, protocol: str, collective: str) -> Scaling:
        return self._scaling(scope_of(nodes), algorithm, protocol, collective)

    def _scaling(self, scope: str, algorithm: str, protocol: str, collective: str) -> Scaling:
        for key in ((scope, algorithm, protocol, collective), (scope, algorithm, protocol, "")):
            if key in self.scalings:
                return self.scalings[key]
        if algorithm == "p2p":
            return sends_like_rings(self._scaling(scope, "ring", protocol, ""), self._scaling(scope, "ring", "ll", ""))
        if scope == "network":  # without data from between nodes: links there as NCCL has them
            node = self._scaling("node", algorithm, protocol, "")
            channel_us = max(node.channel_us, UNSEEN_NET_CHANNEL_US)
            unseen = replace(node, net_hop=UNSEEN_NET_HOP[protocol], channel_us=channel_us, transfer=1.0)
            return unseen if self.scalings else STOCK
        channel_us = next((s.channel_us for (_, a, *_), s in self.scalings.items() if a != "p2p"), 0.0)
        return replace(STOCK, channel_us=channel_us)

    def supported_by(self, nodes: int, algorithm: str, protocol: str, collective: str) -> Support | None:
        scope = scope_of(nodes)
        found = self.support.get((scope, algorithm, protocol, collective))
        return found or self.support.get((scope, algorithm, protocol, ""))

    def band(self, nodes: int, algorithm: str, protocol: str, collective: str) -> tuple[float, float]:
        """What a prediction should be multiplied with for its tenth and ninetieth percentile."""
        found = self.supported_by(nodes, algorithm, protocol, collective)
        if found is not None:
            return found.band
        return UNSEEN_NETWORK_BAND if nodes > 1 and self.scalings else STOCK_BAND


def scope_of(nodes: int) -> str:
    """ "node" or "network": which scalings a group on ``nodes`` nodes takes."""
    return "node" if nodes == 1 else "network"


def sends_like_rings(ring: Scaling, ring_ll: Scaling) -> Scaling:
    """Sends without data of their own: their kernels copy as rings' of the same protocol do, and start as those of LL
    (``point_to_point``)."""
    return replace(ring, base=ring_ll.base, channel_us=0.0, copy=min(ring.copy, 0.25))


# ---- files ----


def load_calibration(path: str | Path) -> Calibration:
    """Raises UsageError with file and key."""
    return _load(Path(path))


def shipped_calibration(accelerator: str) -> Calibration | None:
    """The calibration that comes with an accelerator preset, None if there is none."""
    path = files("echo_hooks.network.calibrations") / f"{accelerator}.toml"
    return _load(path) if path.is_file() else None


def write_calibration(calibration: Calibration, path: str | Path, comment: str = "") -> None:
    """As TOML, sorted, so that equal fits give equal files."""
    lines = [f"# {line}" for line in comment.splitlines()]
    lines += [
        f"format = {FORMAT}",
        f"name = {_text(calibration.name)}",
        f"accelerator = {_text(calibration.accelerator)}",
        f"nccl_version = {_text(calibration.nccl_version)}",
        f"source = {_text(calibration.source)}",
    ]
    for key in sorted(calibration.scalings):
        scaling, support = calibration.scalings[key], calibration.support.get(key)
        lines += ["", "[[fit]]", *(f"{n} = {_text(v)}" for n, v in zip(_KEY, key))]
        lines += [f"{f.name} = {getattr(scaling, f.name):.4g}" for f in fields(Scaling)]
        if support is not None:
            lines += [
                f"points = {support.points}",
                f"error = {support.error:.3f}",
                f"band = [{support.band[0]:.3f}, {support.band[1]:.3f}]",
                f"most_ranks = {support.most_ranks}",
                f"most_nodes = {support.most_nodes}",
                f"identified = [{', '.join(_text(i) for i in support.identified)}]",
            ]
    for table in sorted(calibration.tables, key=lambda t: (t.nodes, t.ranks)):
        lines += ["", "[[table]]", f"ranks = {table.ranks}", f"nodes = {table.nodes}"]
        lines += [f'"{" ".join(key)}" = [{us:g}, {rate:g}]' for key, (us, rate) in sorted(table.rows.items())]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


_KEY = ("scope", "algorithm", "protocol", "collective")
_SUPPORT = tuple(f.name for f in fields(Support))
_TOP = ("format", "name", "accelerator", "nccl_version", "source", "fit", "table")


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)  # a JSON string is a TOML basic string


def _load(path: Path | Traversable) -> Calibration:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise UsageError(f"{path}: larger than {MAX_FILE_BYTES} bytes, so no calibration")
        content = tomllib.loads(data.decode())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not valid TOML ({error})") from None
    if content.get("format") != FORMAT:
        raise UsageError(f"{path}: format: {content.get('format')!r} should be {FORMAT}")
    _known(path, "", content, _TOP)
    texts = {}
    for name in ("name", "accelerator", "nccl_version", "source"):
        texts[name] = content.get(name, "")
        if not isinstance(texts[name], str):
            raise UsageError(f"{path}: {name}: {texts[name]!r} should be a text")
    entries = content.get("fit", [])
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise UsageError(f"{path}: fit: should be tables, each under [[fit]]")
    scalings: dict[Key, Scaling] = {}
    support: dict[Key, Support] = {}
    for i, entry in enumerate(entries):
        where = f"fit {i + 1}"
        key = _key(path, where, entry)
        if key in scalings:
            raise UsageError(f"{path}: {where}: {' '.join(key).strip()} is there twice")
        scalings[key] = _scaling_of(path, where, entry)
        if "points" in entry:
            support[key] = _support_of(path, where, entry)
    printed = content.get("table", [])
    if not isinstance(printed, list) or not all(isinstance(t, dict) for t in printed):
        raise UsageError(f"{path}: table: should be tables, each under [[table]]")
    tables = tuple(_table_of(path, f"table {i + 1}", table) for i, table in enumerate(printed))
    return Calibration(scalings=scalings, support=support, tables=tables, **texts)


def _table_of(path: object, where: str, table: dict[str, Any]) -> TuningTable:
    for name in ("ranks", "nodes"):
        if type(table.get(name)) is not int or table[name] < 1:
            raise UsageError(f"{path}: {where}: {name}: {table.get(name)!r} should be a whole number from 1")
    rows = {}
    for name, value in table.items():
        if name in ("ranks", "nodes"):
            continue
        function, algorithm, protocol = [*name.split(), "", "", ""][:3]
        if function not in FUNCTIONS or algorithm not in ALGORITHMS or protocol not in PROTOCOLS:
            raise UsageError(f"{path}: {where}: {name}: should be a function, an algorithm and a protocol of NCCL")
        if (
            not isinstance(value, list)
            or len(value) != 2
            or not all(type(v) in (int, float) and 0 <= v < 1e9 for v in value)
        ):
            raise UsageError(f"{path}: {where}: {name}: {value!r} should be us and GB/s")
        rows[function, algorithm, protocol] = float(value[0]), float(value[1])
    return TuningTable(table["ranks"], table["nodes"], rows)


def _key(path: object, where: str, entry: dict[str, Any]) -> Key:
    _known(path, f"{where}: ", entry, (*_KEY, *(f.name for f in fields(Scaling)), *_SUPPORT))
    values = [entry.get(name) for name in _KEY]
    for name, value in zip(_KEY, values):
        if not isinstance(value, str):
            raise UsageError(f"{path}: {where}: {name}: {value!r} should be a text")
    if values[0] not in ("node", "network"):
        raise UsageError(f'{path}: {where}: scope: {values[0]!r} should be "node" or "network"')
    return tuple(values)  # type: ignore[return-value]


def _scaling_of(path: object, where: str, entry: dict[str, Any]) -> Scaling:
    values = {}
    for spec in fields(Scaling):
        value = entry.get(spec.name, spec.default)
        if type(value) not in (int, float) or not 0 <= value < 1e6:
            raise UsageError(f"{path}: {where}: {spec.name}: {value!r} should be a number from 0")
        values[spec.name] = float(value)
    if values["transfer"] <= 0:
        raise UsageError(f"{path}: {where}: transfer: should be above 0")
    return Scaling(**values)


def _support_of(path: object, where: str, entry: dict[str, Any]) -> Support:
    missing = [name for name in _SUPPORT if name not in entry]
    if missing:
        raise UsageError(f"{path}: {where}: {missing[0]}: missing beside points")
    band = entry["band"]
    if not isinstance(band, list) or len(band) != 2 or not all(type(b) in (int, float) and b > 0 for b in band):
        raise UsageError(f"{path}: {where}: band: {band!r} should be two numbers above 0")
    for name in ("points", "most_ranks", "most_nodes"):
        if type(entry[name]) is not int or entry[name] < 1:
            raise UsageError(f"{path}: {where}: {name}: {entry[name]!r} should be a whole number from 1")
    identified = entry["identified"]
    if not isinstance(identified, list) or not all(isinstance(i, str) for i in identified):
        raise UsageError(f"{path}: {where}: identified: {identified!r} should be a list of multipliers")
    if type(entry["error"]) not in (int, float):
        raise UsageError(f"{path}: {where}: error: {entry['error']!r} should be a number")
    return Support(
        points=entry["points"],
        error=float(entry["error"]),
        band=(float(band[0]), float(band[1])),
        most_ranks=entry["most_ranks"],
        most_nodes=entry["most_nodes"],
        identified=tuple(identified),
    )


def _known(path: object, where: str, table: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in table:
        if name not in names:
            raise UsageError(f"{path}: {where}{name}: unknown key; known here: {', '.join(names)}")
