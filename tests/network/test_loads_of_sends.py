"""The loads of many sends at once are those of each send by itself."""

from __future__ import annotations

import numpy as np
import pytest

from echo_hooks.hardware.cluster import load_cluster
from echo_hooks.network.model import CommunicationModel


@pytest.mark.parametrize("cluster", ["h100-sxm:4x8", "h800:3x8", "mi300x:2x8", "h100-sxm:1x8"])
@pytest.mark.parametrize("bytes", [512, 32 << 20])
def test_together_as_alone(cluster, bytes):
    model = CommunicationModel(load_cluster(cluster))
    rng = np.random.default_rng(0)
    source = rng.integers(0, model.cluster.world_size, 60)
    destination = (source + rng.integers(1, model.cluster.world_size, 60)) % model.cluster.world_size
    for a, b in zip(source.tolist(), destination.tolist()):
        cost = model.point_to_point(a, b, bytes, group_size=2)
        # Two others with them, so that places in the arrays count.
        ends = np.array([a, b, a]), np.array([b, a, b])
        send, resource, loads = model.loads_of_sends(*ends, bytes, cost)
        for place in (0, 2):
            mine = send == place
            assert dict(zip(resource[mine].tolist(), loads[mine].tolist())) == pytest.approx(dict(cost.loads))
            assert len(set(resource[mine].tolist())) == mine.sum()


def test_every_link_on_the_way():
    """By hand, from rank 0 to rank 13 on two nodes of eight with rails: rank 5's rail, reached inside node 0."""
    model = CommunicationModel(load_cluster("h100-sxm:2x8"))
    assert model.cluster.rails and model.cluster.nics_per_node == 8
    cost = model.point_to_point(0, 13, 1 << 20, group_size=2)
    send, resource, _ = model.loads_of_sends(np.array([0]), np.array([13]), 1 << 20, cost)
    names = sorted(model.resources[r].name for r in resource)
    assert names[:4] == ["NIC 5 of node 0 out", "NIC 5 of node 1 in", "scale-up into 5", "scale-up out of 0"]
    assert not send.any()
