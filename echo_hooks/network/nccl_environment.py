"""The NCCL_* variables of the simulated job that change what NCCL runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from echo_hooks.errors import UsageError
from echo_hooks.network.nccl_tables import ALGORITHMS, PROTOCOLS, THREADS

FUNCTIONS = ("broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce")
_FUNCTION_NAMES = {name.replace("_", ""): name for name in FUNCTIONS}
_ALGORITHM_NAMES = {name.replace("_", ""): name for name in ALGORITHMS}
_P2P_LEVELS = ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS")


_EVERY_ALGORITHM, _EVERY_PROTOCOL = frozenset(ALGORITHMS), frozenset(PROTOCOLS)
_NOTHING: frozenset[str] = frozenset()
Choice = Mapping[str, frozenset[str]]  # by function


def _each(choice: frozenset[str]) -> Choice:
    return dict.fromkeys(FUNCTIONS, choice)


@dataclass(frozen=True)
class Environment:
    """What is set; None means NCCL decides.

    ``algorithms``, ``protocols``: per function those that stay; ``forced_protocols``: those that were named, which
    switches LL128 on where it is off by default. ``threads``: per protocol.
    """

    algorithms: Choice = field(default_factory=lambda: _each(_EVERY_ALGORITHM))
    protocols: Choice = field(default_factory=lambda: _each(_EVERY_PROTOCOL))
    forced_protocols: Choice = field(default_factory=lambda: _each(_NOTHING))
    min_channels: int | None = None
    max_channels: int | None = None
    nvls: bool | None = None
    nvls_channels: int | None = None
    pat: bool | None = None
    collnet: bool = False
    peer_to_peer: bool = True
    net_overhead_us: float | None = None
    buffer_bytes: int = 4 << 20
    threads: Mapping[str, int] = field(default_factory=lambda: THREADS)
    min_p2p_channels: int | None = None
    max_p2p_channels: int | None = None
    channels_per_net_peer: int | None = None
    p2p_ll_threshold_bytes: int = 16 << 10


def read_environment(variables: Mapping[str, str]) -> Environment:
    """The NCCL_* variables in ``variables``; those without effect on the model are ignored.

    Raises UsageError for a value NCCL itself would refuse, by name.
    """
    algorithms, _ = _selection(variables, "NCCL_ALGO", _ALGORITHM_NAMES, _EVERY_ALGORITHM)
    protocols, forced = _selection(variables, "NCCL_PROTO", {name: name for name in PROTOCOLS}, _EVERY_PROTOCOL)
    nvls = _integer(variables, "NCCL_NVLS_ENABLE", 0, 2)
    pat = _integer(variables, "NCCL_PAT_ENABLE", 0, 2)
    overhead = _integer(variables, "NCCL_NET_OVERHEAD", 0, 10**9)
    threads = dict(THREADS)
    for name, keys, most in (("NCCL_NTHREADS", ("ll", "simple"), 512), ("NCCL_LL128_NTHREADS", ("ll128",), 640)):
        value = _integer(variables, name, 64, most)
        if value is not None:
            threads.update(dict.fromkeys(keys, value // 32 * 32))
    level = variables.get("NCCL_P2P_LEVEL", "").strip().upper()
    if level and level not in _P2P_LEVELS and not level.isdigit():
        raise UsageError(f"NCCL_P2P_LEVEL={level!r} should be one of {', '.join(_P2P_LEVELS)}")
    return Environment(
        algorithms=algorithms,
        protocols=protocols,
        forced_protocols=forced,
        min_channels=_channels(variables, "MIN"),
        max_channels=_channels(variables, "MAX"),
        nvls=None if nvls in (None, 2) else bool(nvls),
        nvls_channels=_integer(variables, "NCCL_NVLS_NCHANNELS", 1, 64),
        pat=None if pat in (None, 2) else bool(pat),
        collnet=bool(_integer(variables, "NCCL_COLLNET_ENABLE", 0, 1)),
        peer_to_peer=not _integer(variables, "NCCL_P2P_DISABLE", 0, 1) and level not in ("LOC", "0"),
        net_overhead_us=None if overhead is None else overhead / 1e3,
        buffer_bytes=_integer(variables, "NCCL_BUFFSIZE", 1, 1 << 40) or 4 << 20,
        threads=threads,
        min_p2p_channels=_integer(variables, "NCCL_MIN_P2P_NCHANNELS", 1, 64),
        max_p2p_channels=_integer(variables, "NCCL_MAX_P2P_NCHANNELS", 1, 64),
        channels_per_net_peer=_integer(variables, "NCCL_NCHANNELS_PER_NET_PEER", 1, 64),
        p2p_ll_threshold_bytes=_first(_integer(variables, "NCCL_P2P_LL_THRESHOLD", 0, 1 << 40), 16 << 10),
    )


def _first(value: int | None, default: int) -> int:
    return default if value is None else value


def _channels(variables: Mapping[str, str], which: str) -> int | None:
    """NCCL_MAX_CTAS is today's name, NCCL_MAX_NCHANNELS the one that still wins (init.cc)."""
    for name in (f"NCCL_{which}_NCHANNELS", f"NCCL_{which}_NRINGS", f"NCCL_{which}_CTAS"):
        value = _integer(variables, name, 1, 64)
        if value is not None:
            return value
    return None


def _integer(variables: Mapping[str, str], name: str, low: int, high: int) -> int | None:
    text = variables.get(name, "").strip()
    if not text:
        return None
    try:
        value = int(text, 0)
    except ValueError:
        raise UsageError(f"{name}={text!r} should be a whole number from {low} to {high}") from None
    if value in (-1, -2):  # how NCCL itself writes "not set"
        return None
    if not low <= value <= high:
        raise UsageError(f"{name}={text!r} should be a whole number from {low} to {high}")
    return value


def _selection(
    variables: Mapping[str, str], name: str, known: Mapping[str, str], every: frozenset[str]
) -> tuple[Choice, Choice]:
    """What a list such as "ring,tree;allreduce:^tree" leaves per function, and what it names outright."""
    allowed, named = dict.fromkeys(FUNCTIONS, every), dict.fromkeys(FUNCTIONS, _NOTHING)
    for part in filter(None, (p.strip().lower() for p in variables.get(name, "").split(";"))):
        prefix, colon, elements = part.rpartition(":")
        functions = FUNCTIONS if not colon else (_FUNCTION_NAMES.get(prefix.strip(), ""),)
        if functions == ("",):
            raise UsageError(f"{name}: {prefix.strip()!r} should be one of {', '.join(_FUNCTION_NAMES)}")
        exclude = elements.startswith("^")
        chosen = set()
        for element in filter(None, (e.strip() for e in elements.removeprefix("^").split(","))):
            if element not in known:
                raise UsageError(f"{name}: {element!r} should be one of {', '.join(known)}")
            chosen.add(known[element])
        for function in functions:
            allowed[function] = every - chosen if exclude else frozenset(chosen)
            named[function] = _NOTHING if exclude else frozenset(chosen)
    return allowed, named
