"""Pipeline orders of the literature, built by hand with free communication, give their published bubbles exactly."""

from __future__ import annotations

import pytest
from hand_built import FakeNetwork, Plan

FREE = FakeNetwork(lambda *a: 0.0)
Work = tuple[str, int, int]  # "F", "B" (or its parts "B" and "W"), micro-batch, chunk


def pipeline(orders: list[list[Work]], chunks: int, us: dict[str, float]):
    """Every rank works its list off; virtual stage chunk * ranks + rank hands on over a stream and group of its own."""
    ranks = len(orders)
    plan = Plan(ranks)
    edges = {}
    for stage in range(ranks * chunks - 1):
        for way in ("F", "B"):
            pair = sorted({stage % ranks, (stage + 1) % ranks})
            edges[way, stage] = plan.group(*pair, name="pp", site=f"{way}{stage}")
    last = ranks * chunks - 1
    for r, order in enumerate(orders):
        rank = plan.rank(r)
        for kind, _, chunk in order:
            stage = chunk * ranks + r
            source, target = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
            if kind != "W" and 0 <= source <= last and ranks > 1:
                edge = edges[kind, min(source, stage)]
                rank.recv(source % ranks, 1, group=edge, stream=f"in{edge}")
                rank.wait(rank.record(f"in{edge}"))
            rank.run(us[kind])
            if kind != "W" and 0 <= target <= last and ranks > 1:
                edge = edges[kind, min(target, stage)]
                rank.wait(rank.record(), f"out{edge}")
                rank.send(target % ranks, 1, group=edge, stream=f"out{edge}")
        rank.collective(1)
        rank.sync()
    return plan.compose(FREE)


def gpipe(p: int, m: int) -> list[list[Work]]:
    return [[("F", i, 0) for i in range(m)] + [("B", i, 0) for i in range(m)] for _ in range(p)]


def one_f_one_b(p: int, m: int) -> list[list[Work]]:
    orders = []
    for r in range(p):
        warm = min(p - 1 - r, m)
        order: list[Work] = [("F", i, 0) for i in range(warm)]
        for i in range(m - warm):
            order += [("F", warm + i, 0), ("B", i, 0)]
        orders.append(order + [("B", i, 0) for i in range(m - warm, m)])
    return orders


def interleaved(p: int, m: int, v: int) -> list[list[Work]]:
    """Narayanan et al., 2021, section 2.2: micro-batches in groups of p, chunk after chunk."""
    forward = [(i + k, c) for i in range(0, m, p) for c in range(v) for k in range(p)]
    backward = [(i + k, c) for i in range(0, m, p) for c in reversed(range(v)) for k in range(p)]
    orders = []
    for r in range(p):
        warm = min((p - r - 1) * 2 + (v - 1) * p, m * v)
        order: list[Work] = [("F", *forward[i]) for i in range(warm)]
        for i in range(m * v - warm):
            order += [("F", *forward[warm + i]), ("B", *backward[i])]
        orders.append(order + [("B", *backward[i]) for i in range(m * v - warm, m * v)])
    return orders


def zero_bubble_h1(p: int, m: int) -> list[list[Work]]:
    """Qi et al., 2024, figure 2: 1F1B with the weights' part of the backward put off by as many as fill the bubble."""
    orders = []
    for r in range(p):
        order: list[Work] = [("F", i, 0) for i in range(p - r)]
        forward, weights = p - r, 0
        for i in range(m):
            order.append(("B", i, 0))
            if forward >= m or i >= r:
                order.append(("W", weights, 0))
                weights += 1
            if forward < m:
                order.append(("F", forward, 0))
                forward += 1
        orders.append(order + [("W", i, 0) for i in range(weights, m)])
    return orders


@pytest.mark.parametrize("p, m", [(1, 3), (2, 2), (4, 8), (8, 8), (4, 17)])
@pytest.mark.parametrize("orders", [gpipe, one_f_one_b])
def test_gpipe_and_1f1b_bubble(orders, p, m):
    result = pipeline(orders(p, m), 1, {"F": 1.0, "B": 2.0})
    assert result.step_time_us == (m + p - 1) * 3
    for t in result.timelines:
        b = t.breakdown
        assert b.compute_us == m * 3
        assert b.step_us - b.compute_us == (p - 1) * 3  # the bubble: (p - 1) / (m + p - 1) of the step


@pytest.mark.parametrize("p, m, v", [(2, 4, 2), (4, 8, 2), (4, 8, 3), (8, 16, 4)])
def test_interleaved_bubble_is_smaller_by_the_chunks(p, m, v):
    result = pipeline(interleaved(p, m, v), v, {"F": 1.0, "B": 2.0})
    assert result.step_time_us == m * v * 3 + (p - 1) * 3


@pytest.mark.parametrize("p, m", [(2, 4), (4, 8), (8, 24)])
def test_zero_bubble_h1(p, m):
    """(p - 1)(F + B - W), against (p - 1)(F + B + W) of 1F1B (Qi et al., table 2)."""
    assert pipeline(zero_bubble_h1(p, m), 1, {"F": 1.0, "B": 1.0, "W": 1.0}).step_time_us == 3 * m + (p - 1)
    assert pipeline(one_f_one_b(p, m), 1, {"F": 1.0, "B": 2.0}).step_time_us == 3 * m + 3 * (p - 1)


def test_bubble_of_four_stages_and_eight_micro_batches():
    """Case 83 of the user-case collection: 3/11 of the step."""
    result = pipeline(one_f_one_b(4, 8), 1, {"F": 1.0, "B": 2.0})
    assert all((t.breakdown.step_us - t.breakdown.compute_us) / t.breakdown.step_us == 3 / 11 for t in result.timelines)
