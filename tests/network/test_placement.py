"""Placement by hand."""

from __future__ import annotations

import pytest

from echo_hooks.hardware.cluster import load_cluster
from echo_hooks.network.placement import place

H100 = load_cluster("h100-sxm:64x8")


@pytest.mark.parametrize(
    ("ranks", "nodes", "per_node", "nics", "stride", "kind", "spans"),
    [
        ((5,), (0,), 1, 1, 0, "single", (1,)),
        (tuple(range(8)), (0,), 8, 8, 1, "intra", (1,)),
        ((0, 2), (0,), 2, 2, 2, "intra", (1,)),
        ((3, 11, 19), (0, 1, 2), 1, 1, 8, "strided", (1,)),
        (tuple(range(16)), (0, 1), 8, 8, 1, "block", (1,)),
        ((0, 1, 8, 9), (0, 1), 2, 2, 0, "partial", (1,)),
        ((0, 1, 8), (0, 1), 2, 1, 0, "irregular", (1,)),
        ((0, 32 * 8), (0, 32), 1, 1, 256, "strided", (2,)),  # two scalable units of 32 nodes
        ((8, 0), (0, 1), 1, 1, -8, "strided", (1,)),
    ],
)
def test_placement(ranks, nodes, per_node, nics, stride, kind, spans):
    p = place(ranks, H100)
    assert (p.nodes, p.per_node, p.nics_per_node, p.stride, p.kind, p.spans) == (
        nodes,
        per_node,
        nics,
        stride,
        kind,
        spans,
    )


def test_two_accelerators_share_a_nic_where_there_are_four():
    import dataclasses

    cluster = dataclasses.replace(H100, nics_per_node=4)
    assert place((0, 1), cluster).nics == ((0,),)
    assert place((1, 2), cluster).nics == ((0, 1),)
    assert place(tuple(range(8)), cluster).nics == ((0, 1, 2, 3),)
