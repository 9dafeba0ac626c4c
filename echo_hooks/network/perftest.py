"""Recognises reports of perftest (ib_write_bw and its kin): they measure a link, which belongs in a cluster file.

linux-rdma/perftest writes its JSON with unquoted names and trailing commas (its issue 216), and says the unit of a
bandwidth, if at all, in the column's name.
"""

from __future__ import annotations

import re

_TEST = re.compile(r"\b(?:RDMA_Write|RDMA_Read|Send|Write|Read|Atomic)\w*[_ ](?:BW|Latency)[_ ]Test\b|\bib_\w+_bw\b")
_JSON_BANDWIDTH = re.compile(r'"?BW_average"?\s*:\s*([0-9.]+)')
_UNIT = re.compile(r"\b(Gb/sec|MiB/sec|MB/sec)\b")
_ROW = re.compile(r"^\s*[0-9]+\s+[0-9]+\s+[0-9.]+\s+([0-9.]+)\s+[0-9.]+\s*$", re.MULTILINE)
# Its MB have always been 2^20 bytes; newer versions write MiB.
_GB_PER_S = {"Gb/sec": 1 / 8, "MB/sec": 2**20 / 1e9, "MiB/sec": 2**20 / 1e9}


def refusal(text: str) -> str:
    """Why a report of perftest is no log of collectives, and what to do with it; "" for any other text."""
    if not _TEST.search(text[:20000]):
        return ""
    rates = [float(found) for found in _JSON_BANDWIDTH.findall(text) or _ROW.findall(text)]
    unit = next(iter(_UNIT.findall(text)), "")
    said = "a report of perftest, which measures a link, not collectives"
    if not rates or unit not in _GB_PER_S:
        missing = "its bandwidth's unit" if rates else "a bandwidth"
        return f"{said}; it does not say {missing} (run ib_write_bw with --report_gbits)"
    return (
        f"{said}: put its {max(rates) * _GB_PER_S[unit]:.4g} GB/s ({max(rates):g} {unit}) into the cluster file as "
        "nic_bandwidth"
    )
