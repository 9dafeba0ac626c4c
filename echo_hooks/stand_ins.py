"""Modules that stand in for packages which need a real device: served at import, taken out again exactly."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

WITHOUT = "ECHO_WITHOUT"
"""Environment variable: distributions, separated by commas, that the cluster lacks and Echo must not stand in for."""


@dataclass(frozen=True)
class StandIn:
    """A package that compiles or loads code for a real device, and what takes its place on a pretended one.

    ``name``: top-level import name. ``modules``: import name of each of its modules -> the module of ours that holds
    their names. ``distribution``: its name in the package index, whose installed version is told as ``__version__``;
    else ``version``. ``frameworks``: top-level names whose use alone calls for the stand-in.
    """

    name: str
    modules: Mapping[str, str]
    distribution: str
    version: str
    frameworks: tuple[str, ...] = ()

    def installed(self) -> str | None:
        """Version of the real package, None where it is missing."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None


class StandIns:
    """A finder in ``sys.meta_path``.

    A stand-in is served where the real package is installed (its kernels would read memory that pretended tensors do
    not have), where one of its frameworks has been imported, and where the script names it (``asked``). A script that
    only looks whether a package is there finds what it would find without Echo.
    ``note`` gets one sentence at each first use.
    """

    def __init__(self, stand_ins: Iterable[StandIn]):
        self.stand_ins = {one.name: one for one in stand_ins}
        self.asked: frozenset[str] = frozenset()
        self.note: Callable[[str], None] = lambda sentence: None
        self.served: list[str] = []
        self._loaded: list[str] = []

    def install(self) -> None:
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Take out the finder and every module it has served."""
        sys.meta_path.remove(self)
        for name in self._loaded:
            sys.modules.pop(name, None)
        self._loaded.clear()
        self.served.clear()

    def directories(self) -> set[str]:
        """Where the modules of ours lie."""
        modules = {module for one in self.stand_ins.values() for module in one.modules.values()}
        specs = (importlib.util.find_spec(module) for module in modules)
        return {os.path.dirname(spec.origin) for spec in specs if spec is not None and spec.origin}

    def say(self, note: Callable[[str], None]) -> None:
        """Repeat what has been said to another recorder: modules are imported once for many ranks."""
        self.note = note
        for name in self.served:
            note(_sentence(self.stand_ins[name]))

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        """Called by the import system."""
        top = name.partition(".")[0]
        one = self.stand_ins.get(top)
        if one is None or not self._wanted(one):
            return None
        ours = one.modules.get(name)
        if ours is None:
            # A module that the stand-in lacks must not come from the real package.
            raise ModuleNotFoundError(f"No module named {name!r} (Echo stands in for {top})", name=name)
        spec = ModuleSpec(name, _Loader(self, one, ours))  # type: ignore[arg-type]  # no Loader by inheritance
        spec.submodule_search_locations = [] if any(other.startswith(name + ".") for other in one.modules) else None
        return spec

    def _wanted(self, one: StandIn) -> bool:
        if one.distribution in os.environ.get(WITHOUT, "").split(","):
            return False
        if one.name in self.served or one.name in self.asked:
            return True
        if any(framework in sys.modules for framework in one.frameworks):
            return True
        return PathFinder.find_spec(one.name) is not None

    def loaded(self, one: StandIn, module: str) -> None:
        self._loaded.append(module)
        if one.name not in self.served:
            self.served.append(one.name)
            self.note(_sentence(one))


def _sentence(one: StandIn) -> str:
    found = one.installed()
    why = "cannot run on a pretended device" if found else "is not installed here"
    return (
        f"{one.distribution} {why}: Echo stands in for version {found or one.version}, with the same modules and"
        " communication, and operations recorded as the fused kernels they stand for"
        f" ({WITHOUT}={one.distribution} simulates a cluster without it)"
    )


class _Loader:
    def __init__(self, finder: StandIns, one: StandIn, ours: str):
        self._finder = finder
        self._one = one
        self._ours = ours

    def create_module(self, spec):
        return None

    def exec_module(self, module: ModuleType) -> None:
        source = importlib.import_module(self._ours)
        vars(module).update({name: value for name, value in vars(source).items() if not name.startswith("__")})
        if module.__name__ == self._one.name:
            module.__version__ = self._one.installed() or self._one.version  # type: ignore[attr-defined]
        self._finder.loaded(self._one, module.__name__)
        if module.__name__ == self._one.name:  # `import package` gives its modules too, as the real ones do
            for name in self._one.modules:
                importlib.import_module(name)
