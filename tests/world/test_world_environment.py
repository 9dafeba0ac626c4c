from __future__ import annotations

import pytest

from echo_hooks.errors import UsageError
from echo_hooks.world import environment


def test_as_torchrun_sets_it():
    values = environment(37, 96, 8, "10.0.0.1", 1234)
    assert values["RANK"] == "37" and values["LOCAL_RANK"] == "5" and values["GROUP_RANK"] == "4"
    assert values["WORLD_SIZE"] == "96" and values["LOCAL_WORLD_SIZE"] == "8" and values["GROUP_WORLD_SIZE"] == "12"
    assert values["MASTER_ADDR"] == "10.0.0.1" and values["MASTER_PORT"] == "1234"
    assert values["ROLE_RANK"] == "37" and values["TORCHELASTIC_RUN_ID"]
    assert all(isinstance(v, str) for v in values.values())


def test_a_world_smaller_than_a_node():
    assert environment(1, 2, 8)["LOCAL_WORLD_SIZE"] == "2"


@pytest.mark.parametrize(("rank", "world", "per_node"), [(4, 4, 4), (-1, 4, 4), (0, 10, 8), (0, 8, 0)])
def test_worlds_that_cannot_be(rank, world, per_node):
    with pytest.raises(UsageError):
        environment(rank, world, per_node)
