"""The integrations' patches: each fits the installed framework, and is taken out again exactly."""

import importlib
import sys

import pytest

from echo_hooks import integrations
from echo_hooks.late import LatePatches

ENTRIES = [(one.name, module, make) for one in integrations.load() for module, make in one.patches.items()]


def test_both_integrations_are_found():
    assert [one.name for one in integrations.load()] == ["deepspeed", "megatron"]


@pytest.mark.parametrize(("name", "module", "make"), ENTRIES, ids=[module for _, module, _ in ENTRIES])
def test_installed_and_removed_exactly(name, module, make):
    """Fails when the framework no longer has what is replaced (Patch says which name, and why it was)."""
    pytest.importorskip(name if name != "megatron" else "megatron.core")
    pytest.importorskip(module.partition(".")[0])  # another package that works with the framework
    # DeepSpeed's module has a local name "torch" that hides it from attribute access.
    importlib.import_module(module)
    loaded = sys.modules[module]
    targets = [(patch.owner, patch.name) for patch in make(loaded)]
    before = [vars(owner).get(attribute, "absent") for owner, attribute in targets]
    late = LatePatches(module, make)
    late.install()
    changed = [vars(owner).get(attribute, "absent") for owner, attribute in targets]
    assert all(a is not b for a, b in zip(before, changed))
    late.remove()
    assert [vars(owner).get(attribute, "absent") for owner, attribute in targets] == before


def test_the_page_names_what_is_patched():
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    for _, module, make in ENTRIES:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        assert [p.name for p in make(sys.modules[module]) if p.name not in page] == []
