"""Integrations: found through an entry-point group, woken when their framework is imported."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType

from echo_hooks.late import LatePatches
from echo_hooks.patching import Patch
from echo_hooks.stand_ins import StandIn, StandIns

GROUP = "echo_hooks.integrations"


@dataclass(frozen=True)
class Integration:
    """What one framework needs.

    ``frameworks``: top-level import names it serves; a script that imports one has it preloaded before ranks fork.
    ``preload``: modules worth importing then. ``patches``: module name -> function that gives the table of patches for
    the module, called right after it was imported.
    ``group_names``: group_desc -> the name reports use. ``environment``: variables set before the script starts.
    ``explain``: the line of arithmetic behind an error of the script's, where its layout is what is wrong.
    ``stand_ins``: packages that cannot work on a pretended device, and what takes their place. ``pretended_only``:
    modules of ``patches`` that are left alone where a real device runs the ops.
    """

    name: str
    frameworks: tuple[str, ...]
    preload: tuple[str, ...] = ()
    patches: Mapping[str, Callable[[ModuleType], list[Patch]]] = field(default_factory=dict)
    group_names: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    explain: Callable[[BaseException], str | None] | None = None
    stand_ins: tuple[StandIn, ...] = ()
    pretended_only: frozenset[str] = frozenset()


def load() -> list[Integration]:
    """All installed integrations, in order of name."""
    points = sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name)
    return [point.load() for point in points]


def late_patches(integrations: list[Integration], *, real_device: bool = False) -> list[LatePatches]:
    """What the integrations replace, one entry for each module that the script may import."""
    return [
        LatePatches(module, make)
        for one in integrations
        for module, make in one.patches.items()
        if not (real_device and module in one.pretended_only)
    ]


def stand_ins(integrations: list[Integration]) -> StandIns:
    """The finder of all modules that the integrations stand in for."""
    return StandIns(stand_in for one in integrations for stand_in in one.stand_ins)
