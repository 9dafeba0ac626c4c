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

WITH = "ECHO_WITH"
"""Likewise those that the cluster has, though neither this machine nor the script's text names them."""


@dataclass(frozen=True)
class StandIn:
    """A package that compiles or loads code for a real device, and what takes its place on a pretended one.

    ``name``: top-level import name. ``modules``: import name of each of its modules -> the module of ours that holds
    their names. ``distribution``: its name in the package index, whose installed version is told as ``__version__``;
    else ``version``. ``frameworks``: modules whose use alone calls for the stand-in. ``words``: what in the script's
    own text or arguments calls for it. ``probed_by``: modules that use the package where it is there and do without it
    else; they alone do not call for it, for a cluster is taken to have what this machine has.
    """

    name: str
    modules: Mapping[str, str]
    distribution: str
    version: str
    frameworks: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    probed_by: tuple[str, ...] = ()

    def installed(self) -> str | None:
        """Version of the real package, None where it is missing."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None


class StandIns:
    """A finder in ``sys.meta_path``.

    A stand-in is served where the real package is installed (its kernels would read memory that pretended tensors do
    not have), where one of its frameworks has been imported, and where the script names it (``asked``, see ``ask``). A
    script that only looks whether a package is there finds what it would find without Echo.
    ``note`` gets one sentence at each first use, and one where a framework looked for a package in vain.
    """

    def __init__(self, stand_ins: Iterable[StandIn]):
        self.stand_ins = {one.name: one for one in stand_ins}
        self.asked: frozenset[str] = frozenset()
        self.note: Callable[[str], None] = lambda sentence: None
        self.served: list[str] = []
        self.lacked: list[str] = []
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
        self.lacked.clear()

    def ask(self, imported: Iterable[str], text: str) -> None:
        """What the script imports, and its text and arguments, in which a stand-in's words are looked for."""
        named = {one.name for one in self.stand_ins.values() if any(word in text for word in one.words)}
        self.asked = frozenset(imported) | named

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
        for distribution in self.lacked:
            note(_missing(distribution))

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        """Called by the import system."""
        top = name.partition(".")[0]
        one = self.stand_ins.get(top)
        if one is None:
            return None
        if not self._wanted(one):
            if one.distribution not in self.lacked and any(module in sys.modules for module in one.probed_by):
                self.lacked.append(one.distribution)
                self.note(_missing(one.distribution))
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
        if one.name in self.served or one.name in self.asked or one.distribution in os.environ.get(WITH, "").split(","):
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


def _missing(distribution: str) -> str:
    return (
        f"{distribution} is not installed here and the script does not name it: the cluster is taken to lack it too"
        f" ({WITH}={distribution} stands in for it)"
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
