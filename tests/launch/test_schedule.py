"""Which ranks get traced for known layouts, and what is found out about ranks that behave differently."""

from __future__ import annotations

from dataclasses import replace

import pytest
from layouts import Layout, trace_of

from echo_hooks.compose.roles import rank_facts, roles_from_facts
from echo_hooks.errors import UsageError
from echo_hooks.graph.merge import match_groups
from echo_launch.schedule import BUDGET, Schedule


def carry_out(layout: Layout, nproc_per_node: int = 8, wanted=None):
    """Waves as lists of ranks, the roles, and what is unsettled."""
    schedule = Schedule(layout.world_size, nproc_per_node, wanted)
    facts, tables, waves = {}, {}, []
    wave = schedule.first()
    while wave is not None:
        waves.append(([rank for rank, _ in wave.ranks], wave.in_order))
        for rank, why in wave.ranks:
            assert rank not in facts and why
            trace = trace_of(rank, layout)
            facts[rank], tables[rank] = rank_facts(trace), trace.groups
        groups, mappings = match_groups(tables)
        renumbered = {
            rank: replace(
                fact,
                point_to_point=frozenset(int(mappings[rank][i]) for i in fact.point_to_point),
                roots=frozenset((int(mappings[rank][i]), root) for i, root in fact.roots),
            )
            for rank, fact in facts.items()
        }
        wave = schedule.next(renumbered, groups)
    roles = roles_from_facts(renumbered, groups, layout.world_size, nproc_per_node)
    assert sorted(rank for role in roles for rank in role.ranks) == list(range(layout.world_size))
    return waves, roles, schedule.unsettled(renumbered, groups)


def traced(waves) -> list[int]:
    return [rank for ranks, _ in waves for rank in ranks]


def test_tp8_pp12_traces_one_rank_a_stage_the_last_stage_by_the_last_rank():
    waves, roles, unsettled = carry_out(Layout(96, tp=8, pp=12, embedding=True))
    assert waves[0] == ([0], False)
    assert traced(waves) == [0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 95, 7]  # and one check of TP
    assert [role.ranks for role in roles] == [tuple(range(s, s + 8)) for s in range(0, 96, 8)]
    assert [role.name for role in roles][:2] == ["pp0", "pp1"]
    assert roles[-1].traced_rank == 95 and roles[-1].proven == (95,)
    assert "pp" in roles[3].why
    assert unsettled == []


def test_stages_that_send_whole_numbers_are_traced_in_order():
    waves, _, _ = carry_out(Layout(96, tp=8, pp=12, integers=True))
    assert [in_order for _, in_order in waves][:2] == [False, True]
    waves, _, _ = carry_out(Layout(96, tp=8, pp=12))
    assert [in_order for _, in_order in waves][:2] == [False, False]


def test_data_parallel_1024_is_one_role_from_four_ranks():
    waves, roles, unsettled = carry_out(Layout(1024))
    assert traced(waves) == [0, 1023, 1, 8]  # first, last, a neighbour, the first of the second node
    assert [(role.name, role.ranks, role.proven) for role in roles] == [("all", tuple(range(1024)), (0, 1, 8, 1023))]
    assert unsettled == []


def test_tensor_times_data_is_one_role():
    waves, roles, _ = carry_out(Layout(64, tp=8))
    assert traced(waves) == [0, 63, 1, 8]
    assert len(roles) == 1


def test_experts_are_collectives_and_make_no_classes():
    waves, roles, _ = carry_out(Layout(64, ep=8))
    assert len(roles) == 1 and len(traced(waves)) <= 4


def test_point_to_point_on_the_world_group_makes_every_rank_a_class():
    waves, roles, _ = carry_out(Layout(8, pp=8, world_p2p=True))
    assert sorted(traced(waves)) == list(range(8))
    assert len(roles) == 8


def test_embedding_groups_separate_their_members():
    layout = Layout(12, tp=2, pp=3, embedding=True, world_p2p=False)
    _, roles, _ = carry_out(layout)
    assert [role.ranks for role in roles] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]


def test_first_rank_alone_that_logs_is_told_from_all_others():
    _, roles, unsettled = carry_out(Layout(1024, special={"0": 5}))
    assert [role.ranks for role in roles] == [(0,), tuple(range(1, 1024))]
    assert unsettled == []


def test_first_rank_of_each_node_is_told_from_its_neighbours():
    _, roles, unsettled = carry_out(Layout(64, special={str(r): 5 for r in range(0, 64, 8)}))
    assert roles[0].ranks == tuple(range(0, 64, 8))
    assert len(roles) == 2 and unsettled == []


def test_root_of_tensor_groups_is_told_from_the_others():
    _, roles, _ = carry_out(Layout(64, tp=8, root_op=True))
    assert roles[0].ranks == tuple(range(0, 64, 8))
    assert len(roles) == 2


def test_last_rank_alone_is_found_within_the_budget():
    waves, roles, unsettled = carry_out(Layout(1024, special={"1023": 5}))
    assert [role.ranks for role in roles] == [tuple(range(1023)), (1023,)]
    assert len(traced(waves)) <= BUDGET and unsettled == []


def test_two_causes_at_once():
    _, roles, unsettled = carry_out(Layout(64, tp=8, root_op=True, special={"63": 9}))
    roots, last = tuple(range(0, 64, 8)), (63,)
    assert [role.ranks for role in roles] == [roots, tuple(r for r in range(63) if r % 8), last]
    assert unsettled == []


def test_a_difference_in_the_first_stage_is_looked_for_in_all_stages():
    _, roles, _ = carry_out(Layout(96, tp=2, pp=4, root_op=True))
    starts = sorted((role.ranks[0], len(role.ranks)) for role in roles)
    assert starts == [(0, 12), (1, 12), (24, 12), (25, 12), (48, 12), (49, 12), (72, 12), (73, 12)]


def test_all_ranks_different_stops_at_the_budget_and_says_so():
    waves, roles, unsettled = carry_out(Layout(256, special={str(r): r for r in range(256)}))
    assert len(traced(waves)) == BUDGET
    assert len(unsettled) == 1 and "--trace-ranks all" in unsettled[0]
    assert any("--trace-ranks all" in role.why for role in roles)


def test_local_synchronisation_ends_with_a_rank_of_every_group():
    layout = Layout(32, tp=4, pp=2, local_sync=True)
    waves, roles, _ = carry_out(layout)
    for _, groups in layout.families():
        for ranks in groups:
            assert set(ranks) & set(traced(waves)), f"nobody of {ranks} was traced"
    assert [role.ranks for role in roles] == [tuple(range(16)), tuple(range(16, 32))]


def test_a_list_is_traced_as_given():
    waves, roles, _ = carry_out(Layout(8, tp=2, pp=2), wanted=(1, 2, 5, 7))
    assert sorted(traced(waves)) == [1, 2, 5, 7]
    assert [(role.ranks, role.proven) for role in roles] == [((0, 1, 2, 3), (1, 2)), ((4, 5, 6, 7), (5, 7))]


def test_a_list_that_leaves_out_a_stage_is_refused():
    with pytest.raises(UsageError, match=r"4-7.*add 4"):
        carry_out(Layout(8, tp=2, pp=2), wanted=(0, 1))


def test_all_ranks_traced_is_all_ranks_proven():
    waves, roles, _ = carry_out(Layout(8, tp=2, pp=2, special={"3": 7}), wanted=tuple(range(8)))
    assert sorted(traced(waves)) == list(range(8))
    assert [role.ranks for role in roles] == [(0, 1, 2), (3,), (4, 5, 6, 7)]
    assert all(role.ranks == role.proven and role.why == "every rank was traced" for role in roles)


def test_a_donor_that_was_not_traced_is_traced_within_the_budget():
    waves, _, _ = carry_out(Layout(8, asks={"7": 3}))
    assert 3 in traced(waves)
