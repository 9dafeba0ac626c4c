"""Integrations: found through an entry-point group, woken when their framework is imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType

GROUP = "echo_hooks.integrations"


@dataclass(frozen=True)
class Integration:
    """What one framework needs.

    ``frameworks``: top-level import names it serves; a script that imports one has it preloaded before ranks fork.
    ``preload``: modules worth importing then. ``on_import``: module name -> function called with the module right
    after it was imported (it applies the table of patches for that module and returns what undoes them, or None).
    ``group_names``: group_desc -> the name reports use. ``environment``: variables set before the script starts.
    """

    name: str
    frameworks: tuple[str, ...]
    preload: tuple[str, ...] = ()
    on_import: Mapping[str, Callable[[ModuleType], Callable[[], None] | None]] = field(default_factory=dict)
    group_names: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def load() -> list[Integration]:
    """All installed integrations, in order of name."""
    points = sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name)
    return [point.load() for point in points]


class ImportWatcher(importlib.abc.MetaPathFinder):
    """Calls back right after named modules have been imported; modules imported already are served at once."""

    def __init__(self, integrations: list[Integration]):
        self._callbacks: dict[str, list[Callable]] = {}
        self._undo: list[Callable[[], None]] = []
        self._busy: set[str] = set()
        for integration in integrations:
            for module, callback in integration.on_import.items():
                self._callbacks.setdefault(module, []).append(callback)

    def install(self) -> None:
        for name in self._callbacks:
            if name in sys.modules:
                self._imported(sys.modules[name])
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        sys.meta_path.remove(self)
        while self._undo:
            self._undo.pop()()

    def find_spec(self, name, path=None, target=None):
        if name not in self._callbacks or name in self._busy:
            return None
        self._busy.add(name)
        try:
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        finally:
            self._busy.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._imported)
        return spec

    def _imported(self, module: ModuleType) -> None:
        for callback in self._callbacks[module.__name__]:
            undo = callback(module)
            if undo is not None:
                self._undo.append(undo)


class _Loader(importlib.abc.Loader):
    """Runs a module's own loader, then the callback."""

    def __init__(self, inner, done: Callable[[ModuleType], None]):
        self._inner = inner
        self._done = done

    def create_module(self, spec):
        return self._inner.create_module(spec)

    def exec_module(self, module) -> None:
        self._inner.exec_module(module)
        module.__loader__ = self._inner
        self._done(module)

    def __getattr__(self, name):
        return getattr(self._inner, name)
