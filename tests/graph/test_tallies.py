"""Parts built by the stages of a pipeline against parts configured."""

from types import SimpleNamespace

from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.tallies import missing_parts


def problems(built: dict[int, tuple[int, int]], roles: dict[int, list[int]]):
    groups = GroupTable()
    groups.add((0, 1, 2, 3), name="world")
    groups.add((0, 2), name="pp", site="a")
    groups.add((1, 3), name="pp", site="a")
    traces = {rank: SimpleNamespace(tallies={"layers": pair}) for rank, pair in built.items()}
    return missing_parts(groups, [SimpleNamespace(traced_rank=t, ranks=r) for t, r in roles.items()], traces)


def test_fewer_than_configured():
    # 30 layers on two stages that round down to 14
    (found,) = problems({0: (14, 30), 2: (14, 30)}, {0: [0, 1], 2: [2, 3]})
    assert found.kind == "layout" and found.ranks == (0, 2)
    assert "28 layers are built of 30 configured" in found.message and "14/14" in found.message


def test_as_many_or_more():
    assert problems({0: (15, 30), 2: (15, 30)}, {0: [0, 1], 2: [2, 3]}) == []
    assert problems({0: (30, 30), 2: (30, 30)}, {0: [0, 1], 2: [2, 3]}) == []
    assert problems({0: (15, 30)}, {0: [0, 1]}) == []  # a stage that nobody traced
