"""Clusters: presets, files, overrides, and what is said about a wrong one."""

from __future__ import annotations

import pytest

from echo_hooks.errors import UsageError
from echo_hooks.hardware.accelerator import accelerator_names
from echo_hooks.hardware.cluster import cluster_names, default_cluster, describe_cluster, load_cluster

FILE = """
format = 1
accelerator = "h100-sxm"
nodes = 64
accelerators_per_node = 8

[node]
accelerators = { value = 8, source = "ours" }
scale_up = "switch"
multicast = true
host_cpu = "intel"
nics = { value = 4, source = "ours" }
nic_bandwidth = { value = "400 Gb/s", direction = "one way", source = "ours" }

[fabric]
transport = "roce"
rails = false

[fabric.levels.leaf]
nodes = { value = 16, source = "ours" }
oversubscription = { value = 2, source = "ours" }

[fabric.levels.pod]
nodes = { value = 64, source = "ours" }
oversubscription = { value = 4, source = "ours" }
"""


def write(tmp_path, text):
    path = tmp_path / "c.toml"
    path.write_text(text)
    return str(path)


def test_every_accelerator_has_a_preset():
    assert set(accelerator_names()) <= set(cluster_names())


@pytest.mark.parametrize("name", cluster_names())
def test_presets_load_with_a_source_for_every_number(name):
    cluster = load_cluster(f"{name}:2x8")
    assert cluster.accelerator.name == name
    assert cluster.world_size == 16
    assert cluster.nics_per_node == 8
    assert {"node.nics", "node.nic_bandwidth"} <= set(cluster.sources)


def test_h800_nodes():
    cluster = load_cluster("h800:12x8")
    assert (cluster.world_size, cluster.nodes, cluster.accelerators_per_node) == (96, 12, 8)
    assert cluster.nic_bandwidth_bytes_per_s == 50e9
    assert cluster.accelerator.scaleup_bandwidth_bytes_per_s == 200e9


def test_a_part_of_a_node_has_its_part_of_the_nics():
    assert load_cluster("h100-sxm:4x2").nics_per_node == 2
    assert load_cluster("h100-sxm:4x16").nics_per_node == 16


def test_default_cluster_rounds_the_nodes_up():
    cluster = default_cluster(12, 8)
    assert (cluster.nodes, cluster.accelerators_per_node) == (2, 8)
    assert default_cluster(2, 8).world_size == 2


def test_file_of_its_own(tmp_path):
    cluster = load_cluster(write(tmp_path, FILE))
    assert cluster.world_size == 512
    assert [(level.name, level.nodes, level.oversubscription) for level in cluster.levels] == [
        ("leaf", 16, 2.0),
        ("pod", 64, 4.0),
    ]
    assert describe_cluster(cluster)["sources"]["fabric.levels.leaf.nodes"] == "ours"


def test_preset_with_other_nics(tmp_path):
    text = """format = 1
preset = "h100-sxm:4x8"
[node]
nic_bandwidth = { value = "100 Gb/s", direction = "one way", source = "our switch" }
"""
    cluster = load_cluster(write(tmp_path, text))
    assert cluster.nic_bandwidth_bytes_per_s == 12.5e9
    assert cluster.sources["node.nic_bandwidth"] == "our switch"
    assert (cluster.nodes, cluster.nics_per_node, cluster.accelerator.name) == (4, 8, "h100-sxm")


def test_a_cluster_file_may_name_an_accelerator_file_beside_it(tmp_path):
    from importlib.resources import files

    text = (files("echo_hooks.hardware.accelerators") / "h100-sxm.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace('"450 GB/s"', '"300 GB/s"'))
    cluster = load_cluster(write(tmp_path, 'format = 1\npreset = "h100-sxm:1x8"\naccelerator = "mine.toml"\n'))
    assert cluster.accelerator.scaleup_bandwidth_bytes_per_s == 300e9


@pytest.mark.parametrize(
    "text", ["h800", "h800:12", "h800:0x8", "h800:12x", "h800:99999x99999", ":1x8", "h800:-1x8", ""]
)
def test_malformed_specs(text):
    with pytest.raises(UsageError) as error:
        load_cluster(text)
    assert "\n" not in str(error.value)


def test_unknown_preset_suggests_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'h100-sxm'"):
        load_cluster("h100_sxm:1x8")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            'nic_bandwidth = { value = "400 Gb/s", direction',
            'nic_bandwidth = { value = "400", direction',
            "nic_bandwidth",
        ),
        ('"400 Gb/s", direction = "one way"', '"400 Gb/s"', "direction"),
        ('scale_up = "switch"', 'scale_up = "torus"', "switch, mesh"),
        ("multicast = true", "multicast = 1", "true or false"),
        ('scale_up = "switch"', 'scale_up = "mesh"', "multicast"),
        ("nodes = 64\n", "nodes = 0\n", "whole number from 1"),
        ("nodes = 64\n", "", "nodes"),
        ("rails = false", "rails = false\nrail = 1", "unknown key"),
        ("value = 2, source", "value = 0.5, source", "number from 1"),
        (
            "[fabric.levels.pod]\nnodes = { value = 64",
            "[fabric.levels.pod]\nnodes = { value = 24",
            "multiple of the 16",
        ),
        ('accelerator = "h100-sxm"', 'accelerator = "h100-sxn"', "h100-sxm"),
        ("format = 1", "format = 2", "format"),
        ("nics = { value = 4, source", "nics = { value = 4.5, source", "whole number"),
    ],
)
def test_wrong_files_are_told_by_file_and_key(tmp_path, old, new, said):
    assert old in FILE
    path = write(tmp_path, FILE.replace(old, new, 1))
    with pytest.raises(UsageError) as error:
        load_cluster(path)
    assert said in str(error.value) and "c.toml" in str(error.value) and "\n" not in str(error.value)


def test_a_preset_and_a_size_of_its_own_disagree(tmp_path):
    with pytest.raises(UsageError, match="said twice"):
        load_cluster(write(tmp_path, 'format = 1\npreset = "h100-sxm:1x8"\nnodes = 3\n'))


def test_missing_file():
    with pytest.raises(UsageError, match=r"nowhere\.toml"):
        load_cluster("nowhere.toml")


def test_memory_of_a_node_is_stated_or_not_known(tmp_path):
    assert load_cluster("h100-sxm:1x8").host_memory_bytes is None
    stated = 'format = 1\npreset = "h100-sxm:1x8"\n[node]\nhost_memory = { value = "2 TiB", source = "by hand" }\n'
    assert load_cluster(write(tmp_path, stated)).host_memory_bytes == 2 << 40
    with pytest.raises(UsageError, match="host_memory"):
        load_cluster(write(tmp_path, stated.replace("2 TiB", "two")))
