"""perftest's reports are no logs of collectives: what they measure, in the unit they say, belongs in a cluster file."""

from __future__ import annotations

import pytest

from echo_hooks.errors import UsageError
from echo_hooks.network.sweep_files import read_sweeps

# As linux-rdma/perftest issue 216 shows it: names without quotes, trailing commas.
JSON = """{
test_info: {
test: RDMA_Write_BW_Test,
Device: "mlx5_0",
Link_type: IB,
},
results: {
MsgSize: 65536,
n_iterations: 5000,
BW_peak: 196.10,
BW_average: 195.92,
MsgRate: 0.373688,
},
}
"""
TEXT = """                    RDMA_Write BW Test
 #bytes     #iterations    BW peak[{unit}]    BW average[{unit}]   MsgRate[Mpps]
 65536      5000             196.10             195.92               0.373688
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TEXT.format(unit="Gb/sec"), "put its 24.49 GB/s (195.92 Gb/sec) into the cluster file as nic_bandwidth"),
        (TEXT.format(unit="MiB/sec"), "put its 0.2054 GB/s (195.92 MiB/sec)"),
        (JSON, "it does not say its bandwidth's unit"),
        (JSON.replace("BW_average: 195.92,", 'BW_average: 195.92,\nunit: "Gb/sec",'), "put its 24.49 GB/s"),
        (JSON.replace("RDMA_Write_BW_Test", "RDMA_Write_Latency_Test").replace("BW_average", "t_avg"), "a bandwidth"),
    ],
)
def test_a_report_of_a_link_says_where_it_belongs(tmp_path, text, said):
    path = tmp_path / "ib.json"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        read_sweeps(path)
    assert str(error.value).startswith("ib.json: a report of perftest, which measures a link, not collectives")
    assert said in str(error.value)
