"""Plans that cannot run, each with its smallest repair. Case numbers are those of the user-case collection."""

from __future__ import annotations

import pytest
from hand_built import FakeNetwork, Plan

from echo_hooks.compose.check import check
from echo_hooks.graph.roles import Role


def clean(plan: Plan, **options) -> None:
    for folded in (True, False):
        result = plan.compose(folded=folded, **options)
        assert result.problems == [] and result.timelines and result.step_time_us >= 0


def broken(plan: Plan, kind: str = "hang", **options):
    """The plan's first problem, all being of one kind; folded and unfolded must agree on it."""
    results = [plan.compose(folded=folded, **options) for folded in (True, False)]
    first, second = (r.problems for r in results)
    assert {p.kind for p in first} == {p.kind for p in second} == {kind}
    assert first[0].ranks == second[0].ranks
    if kind != "unsafe":
        assert not results[0].timelines
    return first[0]


# ---- 93: one rank's loop ends earlier ----


def evaluation(batches: tuple[int, int], agreed: bool) -> Plan:
    plan = Plan(2)
    for r in (0, 1):
        rank = plan.rank(r)
        for _ in range(max(batches) if agreed else batches[r]):
            rank.collective(64, name="all_gather", site="eval.py:10")
        rank.collective(8, name="all_reduce", site="eval.py:20")
    return plan


def test_uneven_evaluation_loops_meet_in_different_calls():
    problem = broken(evaluation((3, 5), agreed=False), "mismatch")
    assert problem.ranks == (0, 1)
    assert "call #3" in problem.message and "all_gather" in problem.message and "all_reduce" in problem.message
    assert problem.site == "eval.py:20; eval.py:10"
    clean(evaluation((3, 5), agreed=True))


# ---- 96: both send, then receive ----


def exchange(batched: bool = False, reversed_on: int | None = None, bytes: int = 64 << 20, host: bool = False) -> Plan:
    plan = Plan(2)
    stream = "host" if host else "default"
    for r in (0, 1):
        rank = plan.rank(r)
        calls = [
            lambda rank=rank, r=r: rank.send(1 - r, bytes, stream=stream, site="pp.py:5"),
            lambda rank=rank, r=r: rank.recv(1 - r, bytes, stream=stream, site="pp.py:6"),
        ]
        if batched:
            rank.open_batch()
        for call in reversed(calls) if reversed_on == r else calls:
            call()
        rank.close_batch()
    return plan


@pytest.mark.parametrize("host", [False, True])
def test_send_before_receive_on_both_sides_hangs(host):
    problem = broken(exchange(host=host))
    assert problem.ranks == (0, 1) and problem.site == "pp.py:5"
    assert "rank 0 waits in send" in problem.message and "rank 1 waits in send" in problem.message
    clean(exchange(host=host, batched=True))
    clean(exchange(host=host, reversed_on=1))


def test_exchange_of_one_role_hangs_in_a_ring():
    """All ranks in one class: the circle closes over ranks, not over classes."""
    plan = Plan(3)
    pairs = {r: (plan.group(r, (r + 1) % 3, name=f"edge{r}")) for r in range(3)}
    for r in range(3):
        rank = plan.rank(r)
        rank.send((r + 1) % 3, 64 << 20, group=pairs[r])
        rank.recv((r - 1) % 3, 64 << 20, group=pairs[(r - 1) % 3])
    assert broken(plan).ranks == (0, 1, 2)


# ---- 97: completes only while sends are small ----


def test_small_sends_are_unsafe():
    problem = broken(exchange(bytes=64 << 10), "unsafe")
    assert "only if sends" in problem.message and problem.ranks == (0, 1) and problem.site == "pp.py:5"
    times = exchange(bytes=64 << 10).compose(FakeNetwork(lambda *a: 5.0))
    assert times.step_time_us == 10.0  # each sends for 5, then receives what has arrived


@pytest.mark.parametrize("received", [0, 1])
def test_a_send_of_any_size_that_nobody_receives_is_a_hang(received):
    plan = Plan(2)
    sender = plan.rank(0)
    for i in range(2):
        sender.send(1, 8, site=f"pp.py:{i}")
    other = plan.rank(1)
    for _ in range(received):
        other.recv(0, 8)
    other.run(1)
    problem = broken(plan)
    assert f"rank 0's send of 8 bytes bfloat16 to rank 1 (#{received} in this direction)" in problem.message
    assert "rank 1 never receives it" in problem.message and problem.site == f"pp.py:{received}"


# ---- 98: several communicators at once are no error ----


def test_concurrent_communicators_are_legal():
    plan = Plan(2)
    a, b = plan.group(0, 1, name="fsdp"), plan.group(0, 1, name="tp", site="elsewhere")
    for r in (0, 1):
        rank = plan.rank(r)
        first, second = (a, b) if r == 0 else (b, a)  # even the order differs: they run on streams of their own
        done = [rank.asynchronous(8, g, f"comm{g}") for g in (first, second)]
        for event in done:
            rank.wait(event)
        rank.run(5)
    clean(plan)


# ---- 99: a host synchronisation between two asynchronous collectives ----


def two_groups(synchronise: bool) -> Plan:
    plan = Plan(4)
    m, r_ = plan.group(0, 1, 2, 3, name="model"), plan.group(0, 1, 2, 3, name="replica", site="elsewhere")
    for r in range(4):
        rank = plan.rank(r)
        order = [(m, "all_to_all", "emb.py:7"), (r_, "all_reduce", "opt.py:9")]
        if r >= 2:
            order.reverse()
        for i, (group, name, site) in enumerate(order):
            event = rank.asynchronous(8, group, f"comm{group}", site=site, name=name)
            if r >= 2 and i == 0 and synchronise:
                rank.sync(event=event)
            if r < 2 and i == 0 and synchronise:
                rank.sync(event=event)
    return plan


def test_communicators_in_flight_at_once_are_a_risk_to_know():
    """Case 98: the order is the same on all ranks, so nothing is called wrong."""
    plan = Plan(2)
    tp, dp = plan.group(0, 1, name="tp"), plan.group(0, 1, name="dp", site="elsewhere")
    rank = plan.rank(0, (1,))
    rank.collective(5, dp, stream="comm:dp", site="train.py:10")
    rank.run(2)
    rank.collective(5, tp, site="train.py:20")
    rank.sync()
    result = plan.compose()
    assert not result.problems
    (note,) = result.notes
    assert note.startswith("up to 2 communicators have kernels on one accelerator at once")
    assert "(dp, tp; rank 0, train.py:10; train.py:20)" in note


def test_communicators_one_after_the_other_are_none():
    plan = Plan(2)
    tp, dp = plan.group(0, 1, name="tp"), plan.group(0, 1, name="dp", site="elsewhere")
    rank = plan.rank(0, (1,))
    rank.collective(5, dp)
    rank.collective(5, tp)
    rank.wait(rank.record(), stream="comm:dp")
    rank.collective(5, dp, stream="comm:dp")
    rank.collective(0)
    rank.sync()
    assert plan.compose().notes == []


def test_circular_wait_through_a_synchronisation():
    problem = broken(two_groups(True))
    assert len(problem.ranks) == 2 and {r < 2 for r in problem.ranks} == {True, False}
    assert "event synchronisation" in problem.message
    assert "emb.py:7" in problem.site and "opt.py:9" in problem.site
    assert "The others" in problem.message
    clean(two_groups(False))


# ---- 100, 77: a rank that never makes the call ----


def test_missing_participant():
    def plan(skips: bool) -> Plan:
        plan = Plan(4)
        for r in range(4):
            rank = plan.rank(r)
            for i in range(4):
                if not (skips and r == 2 and i == 3):
                    rank.collective(8, site=f"train.py:{i}")
        return plan

    problem = broken(plan(True))
    assert "rank 2 never makes call #3" in problem.message and "ranks 0-1,3 wait" in problem.message
    assert "rank 2 makes 3 calls" in problem.message and "train.py:0" in problem.message
    assert problem.site == "train.py:3"
    clean(plan(False))


def test_group_that_spans_a_stage_without_experts():
    plan = Plan(4)
    experts = plan.group(0, 1, 2, 3, name="expert")
    for r in range(4):
        rank = plan.rank(r)
        rank.run(1)
        if r >= 2:
            rank.collective(8, experts, site="grads.py:3")
    problem = broken(plan)
    assert "ranks 0-1 never make call #0" in problem.message and "expert" in problem.message


# ---- 101: uneven all-to-all whose counts disagree ----


def exchange_plan(wrong: bool) -> Plan:
    plan = Plan(4)
    sends = [[1, 2, 3, 4], [2, 2, 2, 2], [4, 3, 2, 1], [1, 1, 1, 1]]
    for r in range(4):
        rank = plan.rank(r)
        expected = [sends[i][r] for i in range(4)]
        if wrong and r == 2:
            expected[1] += 1
        attrs = (("input_splits", tuple(sends[r])), ("output_splits", tuple(expected)))
        rank.collective(2 * max(sum(sends[r]), sum(expected)), name="all_to_all", attrs=attrs, site="cp.py:4")
    return plan


def test_all_to_all_counts_disagree():
    problem = broken(exchange_plan(True), "mismatch")
    assert "rank 1 sends 2 elements to rank 2" in problem.message and "expects 3" in problem.message
    assert problem.ranks == (1, 2)
    clean(exchange_plan(False))


def test_all_to_all_without_splits_meets_one_with_splits():
    """Rank 0's shares are even both ways and rank 1's are not; they fit all the same."""

    def plan(expected: int) -> Plan:
        plan = Plan(2)
        plan.rank(0).collective(8, name="all_to_all")  # 2 bfloat16 to and from each
        attrs = (("input_splits", (2, 3)), ("output_splits", (expected, 3)))
        plan.rank(1).collective(12, name="all_to_all", attrs=attrs)
        return plan

    clean(plan(2))
    problem = broken(plan(3), "mismatch")
    assert "rank 0 sends 2 elements to rank 1 (input split 1), which expects 3" in problem.message


# ---- 94: groups made by their members alone ----


def made_groups(*calls: tuple[tuple[int, ...], ...]):
    """A plan in which rank r made groups of ``calls[r]``, in that order, and calls the last one it is in."""
    plan = Plan(len(calls))
    number = {ranks: plan.group(*ranks, site="groups.py:3") for ranks in dict.fromkeys(sum(calls, ()))}
    traces = {}
    for r, made in enumerate(calls):
        rank = plan.rank(r)
        rank.run(1)
        traces[r] = rank.trace(r)
        traces[r].created = [0, *(number[ranks] for ranks in made)]
    roles = [Role(f"role{r}", r, (r,), (r,)) for r in traces]
    return check(plan.world_size, plan.groups, roles, traces)


def test_ranks_that_make_other_groups():
    own = made_groups(((0, 3),), ((1, 2),), ((1, 2),), ((0, 3),))
    (problem,) = own
    assert problem.kind == "mismatch" and problem.ranks == (0, 1, 2, 3) and problem.site == "groups.py:3"
    assert "new_group call #1 differs" in problem.message
    assert "ranks 0,3 make one of ranks 0,3" in problem.message and "ranks 1-2 make one of ranks 1-2" in problem.message
    assert made_groups(*[((0, 3), (1, 2))] * 4) == []
    swapped = made_groups(*[((0, 3), (1, 2))] * 3, ((1, 2), (0, 3)))
    assert "rank 3 makes one of ranks 1-2" in swapped[0].message
    assert made_groups(*[((0, 1),)] * 2, (), ()) == []  # the last one is missed where it is used, if it is


# ---- 66: the shape exchange goes over another group ----


def test_send_on_one_group_receive_on_another():
    def plan(same: bool) -> Plan:
        plan = Plan(4)
        pp = [plan.group(0, 2, name="pp"), plan.group(1, 3, name="pp")]
        for r in (0, 1):
            rank = plan.rank(r)
            rank.send(r + 2, 8, group=pp[r], site="p2p.py:1")
            rank.send(r + 2, 800, group=pp[r], site="p2p.py:9")
        for r in (2, 3):
            rank = plan.rank(r)
            rank.recv(r - 2, 8, group=pp[r - 2] if same or r == 2 else 0, site="p2p.py:5")
            rank.recv(r - 2, 800, group=pp[r - 2], site="p2p.py:15")
        return plan

    problem = broken(plan(False), "mismatch")  # 8 bytes meet 800 on the pipeline group
    assert problem.ranks == (1, 3)
    clean(plan(True))


def test_unpaired_send_names_both_lines():
    plan = Plan(2)
    pp = plan.group(0, 1, name="pp")
    plan.rank(0).send(1, 64 << 20, group=0, site="p2p.py:1")
    plan.rank(1).recv(0, 64 << 20, group=pp, site="p2p.py:5")
    problem = broken(plan)
    assert "has no partner" in problem.message and "instead" in problem.message
    assert problem.ranks == (0, 1) and "p2p.py:1" in problem.message and "p2p.py:5" in problem.message


# ---- 67: next and previous rank are the same peer ----


def test_untagged_messages_pair_in_order():
    def plan(sizes) -> Plan:
        plan = Plan(2)
        for r in (0, 1):
            rank = plan.rank(r)
            rank.open_batch()
            for kind, bytes in sizes[r]:
                (rank.send if kind == "s" else rank.recv)(1 - r, bytes, site=f"p2p.py:{bytes}")
            rank.close_batch()
        return plan

    crossed = [("s", 10), ("r", 10), ("s", 20), ("r", 20)], [("s", 20), ("r", 20), ("s", 10), ("r", 10)]
    problem = broken(plan(crossed), "mismatch")
    assert "sends 10 bytes" in problem.message and "receives 20 bytes" in problem.message
    straight = [("s", 10), ("r", 20), ("s", 20), ("r", 10)], [("s", 20), ("r", 10), ("s", 10), ("r", 20)]
    clean(plan(straight))


# ---- 68: fewer micro-batches than stages ----


def test_fewer_micro_batches_than_stages():
    stages, micro = 8, 4
    plan = Plan(stages)
    for r in range(stages):
        rank = plan.rank(r)
        for _ in range(micro):
            if r > 0:
                rank.recv(r - 1, 0)
            rank.run(10)
            if r < stages - 1:
                rank.send(r + 1, 0)
    clean(plan)


# ---- mismatches of size, type, operation, root ----


@pytest.mark.parametrize(
    "other",
    [{"bytes": 16}, {"bytes": 8, "dtype": "float32"}, {"bytes": 8, "name": "broadcast", "root": 0}],
    ids=["bytes", "dtype", "operation"],
)
def test_collectives_that_disagree(other):
    plan = Plan(4)
    for r in range(4):
        plan.rank(r).collective(**(other if r == 3 else {"bytes": 8}), site=f"train.py:{10 + (r == 3)}")
    problem = broken(plan, "mismatch")
    assert problem.ranks == (0, 1, 2, 3) and problem.site == "train.py:10; train.py:11"
    assert "ranks 0-2 call" in problem.message and "rank 3 calls" in problem.message


def test_roots_that_disagree():
    plan = Plan(2)
    for r in (0, 1):
        plan.rank(r).collective(8, name="broadcast", root=r)
    assert "root at place 1" in broken(plan, "mismatch").message


def test_order_differs_across_groups():
    """Blocking calls on two groups in opposite order: no call mismatches, yet each waits for the other."""

    def plan(swap: bool) -> Plan:
        plan = Plan(2)
        a, b = plan.group(0, 1, name="dp"), plan.group(0, 1, name="tp", site="elsewhere")
        for r in (0, 1):
            rank = plan.rank(r)
            for g in (b, a) if swap and r else (a, b):
                rank.collective(8, g, site=f"step.py:{g}")
        return plan

    problem = broken(plan(True))
    assert problem.ranks == (0, 1) and "(dp" in problem.message and "(tp" in problem.message
    clean(plan(False))


def test_hang_in_a_large_folded_world_names_few_ranks():
    plan = Plan(64)
    rows = [plan.group(*range(8 * i, 8 * i + 8), name="tp") for i in range(8)]
    columns = [plan.group(*range(i, 64, 8), name="dp", site="elsewhere") for i in range(8)]
    for first in (0, 1):  # the black and the white squares of a chessboard
        squares = [8 * i + j for i in range(8) for j in range(8) if (i + j) % 2 == first]
        rank = plan.rank(first, tuple(squares[1:]))
        order = [(rows[0], "a.py:1"), (columns[first], "a.py:2")]
        for group, site in reversed(order) if first else order:
            rank.collective(8, group, site=site)
    result = plan.compose()
    (problem,) = result.problems
    assert problem.kind == "hang" and len(problem.ranks) <= 4


# ---- before the first step ----


def test_what_comes_before_the_steps_must_fit_too():
    def plan(skip: bool) -> Plan:
        plan = Plan(2)
        for r in (0, 1):
            rank = plan.rank(r)
            rank.run(float("nan"))  # set-up is not timed
            if not (skip and r == 1):
                rank.collective(8, name="broadcast", root=0, site="setup.py:3")
            rank.steps()
            rank.run(5)
            rank.sync()
        return plan

    problem = broken(plan(True))
    assert "rank 1 never makes call #0" in problem.message and problem.site == "setup.py:3"
    clean(plan(False))
    assert plan(False).compose().step_time_us == 5


def test_plan_without_steps_is_checked_and_not_timed():
    plan = Plan(2)
    for r in (0, 1):
        rank = plan.rank(r)
        rank.collective(8)
        rank.steps()
    result = plan.compose()
    assert result.problems == [] and result.timelines == [] and result.step_time_us != result.step_time_us
