"""Accelerators: what one device can do at most, and what share of it real kernels reach, read from TOML presets."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from echo_hooks.errors import UsageError
from echo_hooks.hardware.fields import Fields, Provenance, read_toml

FORMAT = 1
VENDORS = ("nvidia", "amd", "huawei")
DTYPES = ("float64", "float32", "tf32", "float16", "bfloat16", "float8", "int8")

# Per class of operation: the share of the peak that its kernels reach ("compute", "bandwidth") and the time in which
# a kernel fills and drains the device ("ramp"). The classes and formulas are in echo_hooks/timing.
_MATRIX = {"compute": "share", "bandwidth": "share", "ramp": "time"}
_MEMORY = {"bandwidth": "share", "ramp": "time"}
EFFICIENCY: dict[str, dict[str, str]] = {
    "gemm": _MATRIX,
    "attention_forward": _MATRIX,
    "attention_backward": _MATRIX,
    "elementwise": _MEMORY,  # one dtype, one layout: vectorised loads and stores
    "cast": _MEMORY,  # pointwise with mixed dtypes
    "strided": _MEMORY,  # pointwise with broadcast or permuted operands
    "activation": _MEMORY,  # pointwise with a polynomial per element
    "norm": _MEMORY,
    "norm_backward": _MEMORY,
    "softmax": _MEMORY,
    "softmax_backward": _MEMORY,
    "reduction": _MEMORY,
    "optimizer": _MEMORY,  # foreach and fused multi-tensor kernels
    "gather": _MEMORY,
    "scatter": _MEMORY,
    "concatenate": _MEMORY,
    "fill": _MEMORY,
    "random": _MEMORY,
    "sort": _MEMORY,
    "host_link": _MEMORY,  # copies between host and device
}


@dataclass(frozen=True)
class Accelerator:
    """One device. Rates are the datasheet's; ``efficiency`` says what share of them each class of operation reaches.

    ``product``: what torch.cuda.get_device_name() answers. ``multiprocessors``: SMs, compute units or AI cores.
    ``memory_bytes``: what the driver lets a process allocate in all. ``l2_bytes``: the last cache before memory.
    ``peak_flops``: dense (no structured sparsity) matrix peak in FLOP/s by dtype, only the dtypes it has; "float32"
    is without tensor cores. ``special_function_ops_per_s``: exponentials per second.
    ``launch_overhead_us``: from the end of one kernel to the start of the next on a stream whose work is queued.
    ``host_launch_us``: host cost of an op below the dispatcher, launch included.
    ``host_link_bandwidth_bytes_per_s``, ``scaleup_bandwidth_bytes_per_s`` (NVLink, xGMI, HCCS, per device): one way.
    ``efficiency``: class of operation -> the keys of EFFICIENCY. ``sources``, ``bands``: dotted key of the file ->
    where the number is from (starting with "assumed" where nobody published it), and (low, high).
    """

    name: str
    vendor: str
    product: str
    compute_capability: tuple[int, int] | None
    multiprocessors: int
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    l2_bytes: int
    peak_flops: dict[str, float]
    special_function_ops_per_s: float
    launch_overhead_us: float
    host_launch_us: float
    host_link_bandwidth_bytes_per_s: float
    scaleup_bandwidth_bytes_per_s: float
    efficiency: dict[str, dict[str, float]]
    sources: dict[str, str] = field(default_factory=dict, repr=False)
    bands: dict[str, tuple[float, float]] = field(default_factory=dict, repr=False)


def accelerator_names() -> list[str]:
    """Names of the presets, sorted."""
    return sorted(entry.name.removesuffix(".toml") for entry in _presets().iterdir() if entry.name.endswith(".toml"))


def load_accelerator(name_or_path: str) -> Accelerator:
    """A preset by name, or an accelerator file by its path (ending in ".toml").

    Raises UsageError: no such preset or file, or file and key of what is missing, unknown, without unit or source.
    """
    if name_or_path.endswith(".toml"):
        return _load(Path(name_or_path))
    names = accelerator_names()
    if name_or_path not in names:
        near = difflib.get_close_matches(name_or_path.lower(), names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UsageError(f"unknown accelerator {name_or_path!r}; {hint}known: {', '.join(names)}, or a .toml file")
    return _load(_presets() / f"{name_or_path}.toml")


def _presets() -> Traversable:
    return files("echo_hooks.hardware.accelerators")


def _load(path: Path | Traversable) -> Accelerator:
    provenance = Provenance()
    fields = Fields(path, read_toml(path), provenance)
    fields.expect("format", FORMAT)
    accelerator = Accelerator(
        name=fields.text("name"),
        vendor=fields.choice("vendor", VENDORS),
        product=fields.text("product"),
        compute_capability=_compute_capability(fields),
        multiprocessors=fields.count("multiprocessors"),
        memory_bytes=int(fields.quantity("memory", "bytes")),
        memory_bandwidth_bytes_per_s=fields.quantity("memory_bandwidth", "bandwidth"),
        l2_bytes=int(fields.quantity("l2", "bytes")),
        peak_flops=_peak_flops(fields.table("peak")),
        special_function_ops_per_s=fields.quantity("special_function_rate", "flops"),
        launch_overhead_us=fields.quantity("launch_overhead", "time"),
        host_launch_us=fields.quantity("host_launch", "time"),
        host_link_bandwidth_bytes_per_s=fields.link("host_link_bandwidth"),
        scaleup_bandwidth_bytes_per_s=fields.link("scaleup_bandwidth"),
        efficiency=_efficiency(fields.table("efficiency"), provenance),
        sources=provenance.sources,
        bands=provenance.bands,
    )
    fields.done()
    return accelerator


def _compute_capability(fields: Fields) -> tuple[int, int] | None:
    if "compute_capability" not in fields:
        return None
    version = fields.integers("compute_capability")
    if len(version) != 2:
        raise fields.error("compute_capability", f"{list(version)} should be [major, minor]")
    return version[0], version[1]


def _peak_flops(fields: Fields) -> dict[str, float]:
    """Datasheets print the rate with 2:4 sparsity first, twice the dense one; so the file must say which it means."""
    fields.expect("dense", True)
    peaks = {dtype: fields.quantity(dtype, "flops") for dtype in DTYPES if dtype in fields}
    if "float32" not in peaks:
        raise fields.error("float32", "missing; every accelerator has a float32 rate")
    fields.done(known=("dense", *DTYPES))
    return peaks


def _efficiency(fields: Fields, provenance: Provenance) -> dict[str, dict[str, float]]:
    """The classes' own tables, or ``like = PRESET`` with a ``source``, then only what differs."""
    result: dict[str, dict[str, float]] = {}
    if "like" in fields:
        like, source = fields.text("like"), fields.text("source")
        other_path = _presets() / f"{like}.toml"
        if like not in accelerator_names():
            raise fields.error("like", f"{like!r} is no preset; known: {', '.join(accelerator_names())}")
        other = Fields(other_path, read_toml(other_path), Provenance()).table("efficiency")
        if "like" in other:
            raise fields.error("like", f"{like!r} itself takes its numbers from elsewhere; name that one")
        result = _efficiency(other, provenance)
        for name, keys in EFFICIENCY.items():
            provenance.sources.update({f"efficiency.{name}.{key}": f"{source} (of {like})" for key in keys})
    for name, keys in EFFICIENCY.items():
        if name in fields or name not in result:
            result[name] = result.get(name, {}) | _class_efficiency(
                fields.table(name), keys, complete=name not in result
            )
    fields.done()
    return result


def _class_efficiency(fields: Fields, keys: dict[str, str], *, complete: bool) -> dict[str, float]:
    values = {
        key: fields.share(key) if dimension == "share" else fields.quantity(key, dimension)
        for key, dimension in keys.items()
        if complete or key in fields
    }
    fields.done(known=tuple(keys))
    return values
