"""Patches of modules that may be imported later, or never: nothing is imported for a patch's sake."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from types import ModuleType

from echo_hooks.patching import Patch, PatchSet


class LatePatches:
    """Patches of one module, installed as soon as it has been imported."""

    def __init__(self, module: str, make: Callable[[ModuleType], list[Patch]]):
        self.module = module
        self.make = make
        self._patches: PatchSet | None = None

    def install(self) -> None:
        if self.module in sys.modules:
            self._apply(sys.modules[self.module])
        else:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if self._patches is not None:
            self._patches.remove()
            self._patches = None

    def _apply(self, module: ModuleType) -> None:
        self._patches = PatchSet(self.make(module))
        self._patches.install()

    def find_spec(self, name: str, path=None, target=None):
        """Called by the import system; answers for our module only, with a loader that patches what it has loaded."""
        if name != self.module:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader, self._loaded)  # type: ignore[assignment]
        return spec

    def _loaded(self, module: ModuleType) -> None:
        sys.meta_path.remove(self)
        self._apply(module)


class _PatchingLoader:
    def __init__(self, loader, loaded: Callable[[ModuleType], None]):
        self._loader = loader
        self._loaded = loaded

    def __getattr__(self, name: str):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._loaded(module)
