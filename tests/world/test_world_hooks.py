"""Hooks come out as they went in; the documentation lists them all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.device_mesh
from torch.distributed import distributed_c10d as c10d

from echo_hooks.late import LatePatches
from echo_hooks.world import redirect

ROOT = Path(__file__).resolve().parents[2]


def snapshot() -> dict:
    owners = [dist, c10d, torch.distributed.device_mesh, dist.ProcessGroup, c10d.Backend]
    values = {(owner.__name__, name): value for owner in owners for name, value in list(vars(owner).items())}
    for table in ("backend_list", "default_device_backend_map", "backend_type_map", "backend_capability", "_plugins"):
        values["table", table] = str(getattr(c10d.Backend, table))
    return values


def test_removal_leaves_torch_as_it_was(world):
    before = snapshot()
    run = world()
    changed = {key for key, value in snapshot().items() if before.get(key) is not value}
    assert ("torch.distributed", "init_process_group") in changed and len(changed) > 20
    dist.new_group([0, 1])
    run.world.remove()
    after = snapshot()
    assert after.keys() == before.keys()
    assert [k for k in before if before[k] != after[k] and k[0] != "torch.distributed.distributed_c10d"] == []
    for key in before:
        if key[1] not in ("_backend", "_default_pg_init_method", "_pg_count"):  # torch's own state of its last group
            assert after[key] is before[key] or key[0] == "table", key
    assert not dist.is_initialized()
    run.world.remove()  # harmless


def test_installing_twice_is_an_error(world):
    run = world(init=False)
    with pytest.raises(RuntimeError, match="installed already"):
        run.world.install()


def test_a_failed_installation_leaves_nothing(world, monkeypatch):
    run = world(init=False)
    run.world.remove()
    before = snapshot()
    monkeypatch.setattr(redirect, "late_patches", lambda world: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.world.install()
    assert all(snapshot()[k] is v for k, v in before.items() if k[0] != "table")


def test_the_page_lists_every_hook(world):
    run = world(init=False)
    stage = __import__("torch.distributed.pipelining.stage", fromlist=["stage"])
    page = (ROOT / "docs" / "world.md").read_text()
    names = {p.name for p in redirect.patches(run.world)} | {
        p.name for p in redirect.pipelining_patches(run.world, stage)
    }
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_late_patches_wait_for_the_import(tmp_path, monkeypatch):
    from echo_hooks.patching import Patch

    (tmp_path / "late_example.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    late = LatePatches("late_example", lambda module: [Patch(module, "VALUE", lambda old: old + 1, "a test")])
    late.install()
    assert "late_example" not in sys.modules
    import late_example

    assert late_example.VALUE == 2
    late.remove()
    assert late_example.VALUE == 1 and late not in sys.meta_path
    late.install()  # imported already: at once
    assert late_example.VALUE == 2
    late.remove()
    late = LatePatches("never_imported", lambda module: [])
    late.install()
    late.remove()
    assert late not in sys.meta_path
