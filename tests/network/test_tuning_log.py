"""The table NCCL prints, read back: by hand, and by deciding as its numbers say."""

from __future__ import annotations

import numpy as np
import pytest

from echo_hooks.errors import UsageError
from echo_hooks.hardware.cluster import load_cluster
from echo_hooks.network.calibration import Calibration
from echo_hooks.network.model import CommunicationModel
from echo_hooks.network.nccl_tuning_log import read_tuning

OFF = "     0.0/   0.0 |"


def line(text):
    return "node1:1:1 [0] NCCL INFO " + text


def header(*algorithms):
    return line("  Algorithm   |" + "".join(f" {'':14}   {a:14}   {'':14} |" for a in algorithms))


LOG = [
    line("comm 0x55 rank 0 nRanks 8 nNodes 1 localRanks 8 localRank 0 MNNVL 0"),
    header("Tree", "Ring", "CollNetDirect"),
    line("  Protocol    |" + 3 * "             LL |          LL128 |         Simple |"),
    line(" Max NThreads |" + 9 * "            512 |"),
    line("    Broadcast |" + 3 * OFF + "     7.2/ 141.0 |    15.9/ 331.2 |    11.8/ 360.0 |" + 3 * OFF),
    line("    AllReduce |" + 3 * OFF + "   900.0/   1.0 |   900.0/   1.0 |    42.5/ 205.7 |" + 3 * OFF),
    header("CollNetChain", "NVLS", "NVLSTree"),
    line("    AllReduce |" + 5 * OFF + "    25.0/ 272.0 |" + 3 * OFF),
    line("    AllGather |     0.0/   0.0 |     0.0"),
]


def test_tables_are_read():
    (table,) = read_tuning(LOG, "log")
    assert (table.ranks, table.nodes) == (8, 1)
    assert table.rows["all_reduce", "ring", "simple"] == (42.5, 205.7)
    assert table.rows["all_reduce", "nvls", "simple"] == (25.0, 272.0)
    assert table.rows["broadcast", "ring", "ll"] == (7.2, 141.0)
    assert not any(function == "all_gather" for function, *_ in table.rows)  # cut off


def test_the_printed_table_decides():
    cluster, ranks = load_cluster("h100-sxm:1x8"), tuple(range(8))
    ours = CommunicationModel(cluster, calibration=Calibration())
    theirs = CommunicationModel(cluster, calibration=Calibration(), printed=read_tuning(LOG, "log"))
    size = np.array([64 << 10])
    assert ours.plan("all_reduce", ranks, size, "float32")[0].protocol == "ll"
    chosen = theirs.plan("all_reduce", ranks, size, "float32")[0]
    assert (chosen.algorithm, chosen.protocol) == ("nvls", "simple")  # 25 us + 64 KiB at 272 GB/s is the least
    # A group of another size is decided by the rules.
    assert theirs.plan("all_reduce", ranks[:4], size, "float32")[0].protocol == "ll"


def test_logs_without_a_table_say_so():
    with pytest.raises(UsageError, match="no tuning table"):
        read_tuning(["hello"], "log")
    with pytest.raises(UsageError, match="say its ranks"):
        read_tuning(LOG[1:], "log")
    assert read_tuning(LOG[1:], "log", ranks=4, nodes=2)[0].nodes == 2
