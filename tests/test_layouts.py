"""Arithmetic of layouts and the line beside a framework's own error; numbers are those of public cases."""

from __future__ import annotations

import pytest

from echo_hooks.layouts import nearest, split_line, uneven_stages, world_line


def test_world():
    # TP 7 on 96 ranks; the two worlds around are named too
    assert world_line(96, {"TP": 7, "PP": 12, "CP": 1}) == (
        "world 96 is no multiple of TP 7 x PP 12 x CP 1 = 84; nearest legal: "
        "TP 8 (96 = TP 8 x PP 12 x CP 1 x DP 1), or world 84 or world 168"
    )
    # THUDM/slime#1818
    line = world_line(8, {"ETP": 1, "EP": 8, "PP": 2}, "EDP", {"ETP": "default: TP"})
    assert line == (
        "world 8 is no multiple of ETP (default: TP) 1 x EP 8 x PP 2 = 16; nearest legal: "
        "EP 4 (8 = ETP 1 x EP 4 x PP 2 x EDP 1), or PP 1 (8 = ETP 1 x EP 8 x PP 1 x EDP 1), or world 16"
    )
    assert world_line(96, {"TP": 8, "PP": 12}) is None


def test_splits():
    assert split_line("attention heads", 14, "TP", 4) == (
        "14 attention heads / TP 4 = 3.5, not whole; nearest legal: TP 2 or TP 7, or 12 or 16 attention heads"
    )
    assert split_line("heads", 16, "TP", 4) is None
    assert split_line("heads", 0, "TP", 4) is None


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [(30, 4, (7, 8, 8, 7)), (61, 8, (7, 8, 8, 8, 8, 8, 8, 6)), (5, 2, (2, 3)), (3, 4, None), (7, 1, None)],
)
def test_uneven_stages(layers, stages, counts):
    found = uneven_stages(layers, stages)
    if counts is None:
        assert found is None
        return
    assert sum(found) == layers and len(found) == stages and len(set(found[1:-1])) <= 1
    assert max(found) - min(found) <= max(counts) - min(counts)


def test_nearest():
    assert nearest([1, 2, 4, 8], 3) == [2, 4]
    assert nearest([1, 2, 4, 8], 9) == [8]
