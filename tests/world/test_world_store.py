from __future__ import annotations

import gc
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from echo_hooks.errors import ScriptError


def test_own_keys(world):
    world()
    store = c10d._get_default_store()
    store.set("a", "1")
    assert store.get("a") == b"1" and store.check(["a"]) and not store.check(["b"])
    store.append("a", "2")
    assert store.get("a") == b"12"
    assert store.multi_get(["a", "a"]) == [b"12", b"12"]
    store.multi_set(["c", "d"], ["3", "4"])
    assert store.get("d") == b"4"
    assert store.delete_key("a") and not store.delete_key("a")
    assert store.num_keys() == 2
    assert store.compare_set("c", "3", "5") == b"5" and store.compare_set("c", "3", "6") == b"5"


def test_keys_of_ranks_traced_before(world):
    world(rank=0)
    c10d._get_default_store().set("address", "10.0.0.1")
    world(rank=1)
    assert c10d._get_default_store().get("address") == b"10.0.0.1"
    c10d._get_default_store().wait(["address"], timedelta(seconds=1))


def test_unknown_key_raises_at_once_with_key_rank_and_line(world):
    world(rank=1)
    with pytest.raises(ScriptError, match=r"Rank 1 asks the store for '\S*port' at test_world_store\.py:\d+"):
        c10d._get_default_store().get("port")
    with pytest.raises(ScriptError, match="port"):
        c10d._get_default_store().wait(["port"], timedelta(hours=1))


def test_counters_count_everyone(world):
    run = world(rank=1, world_size=4)
    store = c10d._get_default_store()
    assert store.add("arrived", 1) == 4 and store.add("arrived", 0) == 4
    assert run.assumed() == {"store counter: peers' shares": "as this rank's own"}


def test_scripts_own_stores_do_not_wait(world):
    world(rank=1)
    store = dist.TCPStore("127.0.0.1", 1, 4, False)
    store.set("k", "v")
    gc.collect()
    prefixed = dist.PrefixStore("p", store)
    prefixed.set("k", "w")
    assert store.get("k") == b"v" and store.get("p/k") == b"w"


def test_the_store_outlives_collection(world):
    world()
    gc.collect()
    c10d._get_default_store().set("a", "1")
    assert c10d._get_default_store().get("a") == b"1"


def test_barrier_after_init(world, monkeypatch):
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")
    world()
    dist.new_group([0, 1])
    dist.new_group([1, 2], use_local_synchronization=True)
