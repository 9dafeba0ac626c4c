"""Patches: installed together, removed exactly."""

import types

import pytest

from echo_hooks.patching import Patch, PatchSet


class Base:
    def inherited(self):
        return "base"


class Owner(Base):
    @staticmethod
    def fixed():
        return "original"


def test_removed_exactly():
    before = dict(vars(Owner))
    patches = PatchSet(
        [
            Patch(Owner, "fixed", lambda old: staticmethod(lambda: "new " + old.__func__()), "why"),
            Patch(Owner, "inherited", lambda _: lambda self: "patched", "why"),
            Patch(Owner, "absent", lambda old: old or 5, "why", create=True),
        ]
    )
    patches.install()
    assert (Owner.fixed(), Owner().inherited(), Owner.absent) == ("new original", "patched", 5)
    patches.remove()
    assert dict(vars(Owner)) == before
    assert Owner().inherited() == "base"


def test_a_name_that_is_gone_is_an_error_and_nothing_stays_patched():
    module = types.ModuleType("library")
    module.here = 1
    patches = PatchSet([Patch(module, "here", lambda _: 2, "why"), Patch(module, "gone", lambda _: 2, "the reason")])
    with pytest.raises(AttributeError, match=r"library has no attribute 'gone'.*the reason"):
        patches.install()
    assert module.here == 1
