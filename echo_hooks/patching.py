"""Patches of other people's libraries: declared in tables, installed together, removed exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MISSING = object()


@dataclass(frozen=True)
class Patch:
    """One replaced attribute.

    ``owner`` is the module or class, ``name`` the attribute, ``make`` gets the original (``None`` where the library
    has no such attribute) and returns the replacement. ``why`` and ``since`` (first version of the library in which
    the patch is needed) are for the reader and for the tables in the documentation.
    """

    owner: Any
    name: str
    make: Callable[[Any], Any]
    why: str
    since: str = ""
    create: bool = False  # True: the attribute may be absent (it is deleted again on removal)


class PatchSet:
    """Patches installed in order and removed in reverse order; removal restores the very objects found."""

    def __init__(self, patches: list[Patch]):
        self.patches = patches
        self._saved: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Replace every attribute; on an error what was replaced before is put back.

        Raises AttributeError naming library and attribute when a library no longer has what a patch replaces.
        """
        try:
            for patch in self.patches:
                self._install_one(patch)
        except BaseException:
            self.remove()
            raise

    def _install_one(self, patch: Patch) -> None:
        # vars() keeps staticmethod and classmethod objects, which getattr would unwrap; inherited names are absent.
        original = vars(patch.owner).get(patch.name, _MISSING)
        visible = getattr(patch.owner, patch.name, _MISSING) if original is _MISSING else original
        if visible is _MISSING and not patch.create:
            owner = getattr(patch.owner, "__name__", repr(patch.owner))
            raise AttributeError(f"{owner} has no attribute {patch.name!r}, which Echo replaces: {patch.why}")
        replacement = patch.make(None if visible is _MISSING else visible)
        setattr(patch.owner, patch.name, replacement)
        self._saved.append((patch.owner, patch.name, original))

    def remove(self) -> None:
        """Put everything back as it was found, newest first."""
        while self._saved:
            owner, name, original = self._saved.pop()
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
