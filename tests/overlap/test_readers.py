"""CSV of Nsight Compute (cases 122 to 124) and pairs in profiled runs."""

from __future__ import annotations

import json
import math

import pytest

from echo_hooks.errors import UsageError
from echo_hooks.overlap.ncu import number, read_ncu
from echo_hooks.overlap.samples import Launch
from echo_hooks.overlap.traces import pairs_in

WIDE_HEADER = ",".join(
    f'"{name}"'
    for name in (
        "ID", "Process ID", "Kernel Name", "Block Size", "Grid Size", "gpu__time_duration.sum", "dram__bytes.sum",
        "launch__registers_per_thread", "launch__shared_mem_per_block_static", "launch__shared_mem_per_block_dynamic",
    )
)  # fmt: skip
WIDE = f"""==PROF== Connected to process 1
==WARNING== Backing up device memory
warning: something else
step 1, loss 2.5
{WIDE_HEADER}
"","","","","","ns","Mbyte","register/thread","byte/block","Kbyte/block"
"0","1","gemm","(384, 1, 1)","(132, 1, 1)","1,234","2.5","168","1,024","64"
"1","1","add","(128, 1, 1)","(32768, 1, 1)","51,400 (+3%)","201.3","34","0","0"
==PROF== Disconnected
"""

LONG = """==PROF== Connected
"ID","Process ID","Kernel Name","Block Size","Grid Size","Section Name","Metric Name","Metric Unit","Metric Value"
"0","1","gemm","(384, 1, 1)","(132, 1, 1)","GPU Speed Of Light","Duration","usecond","1.234"
"0","1","gemm","(384, 1, 1)","(132, 1, 1)","GPU Speed Of Light","DRAM Throughput","%","12 (+3%)"
"0","1","gemm","(384, 1, 1)","(132, 1, 1)","Launch Statistics","Registers Per Thread","register/thread","168"
"0","1","gemm","(384, 1, 1)","(132, 1, 1)","Launch Statistics","Dynamic Shared Memory Per Block","Kbyte/block","64"
"0","1","gemm","(384, 1, 1)","(132, 1, 1)","Another pass","Duration","usecond","9.9"
"1","1","add","(128, 1, 1)","(32768, 1, 1)","GPU Speed Of Light","Duration","ms","0.0514"
"""


def read(tmp_path, text, **options):
    path = tmp_path / "ncu.csv"
    path.write_text(text)
    return read_ncu(path, **options)


def test_both_layouts_give_the_same_times(tmp_path):
    wide, long = read(tmp_path, WIDE), read(tmp_path, LONG)
    for gemm, add in (wide, long):  # the row of units is no kernel; passes over one launch count once
        assert (gemm.name, gemm.duration_us) == ("gemm", pytest.approx(1.234))
        assert (add.name, add.duration_us) == ("add", pytest.approx(51.4))
        assert (gemm.launch.blocks, gemm.launch.threads, gemm.launch.registers) == (132, 384, 168)
        assert gemm.conditions == "ncu: cold cache, locked clock"
    assert wide[0].launch.shared_bytes == 1024 + 64_000 and long[0].launch.shared_bytes == 64_000
    assert wide[0].metrics["dram__bytes.sum"] == 2.5e6
    assert long[0].metrics["DRAM Throughput"] == 12.0


def test_units_in_the_header(tmp_path):
    text = '"ID","Kernel Name","gpu__time_duration.sum [ms]"\n"0","k","0.5"\n'
    assert read(tmp_path, text)[0].duration_us == pytest.approx(500.0)


def test_numbers():
    assert number("1,234,567") == 1234567 and number("12 (+3%)") == 12 and number("-1.5e3") == -1500
    assert number("n/a") is None and number("") is None and number("(132, 1, 1)") is None
    assert number("1.234,5", ",") == 1234.5 and number("1,234", ".") == 1234 and number("1,5", ",") == 1.5
    for text in ("1.234,5", "1,5", "12,34"):
        with pytest.raises(UsageError, match="decimal commas"):
            number(text)


def test_a_comma_locale_has_to_be_declared(tmp_path):
    text = '"ID","Kernel Name","gpu__time_duration.sum"\n"","","us"\n"0","k","1.234,5"\n'
    with pytest.raises(UsageError, match=r"line 3: '1\.234,5' may be of a locale"):
        read(tmp_path, text)
    assert read(tmp_path, text, decimal=",")[0].duration_us == 1234.5


@pytest.mark.parametrize("text", ["", "no csv at all\n", '"a","b"\n"1","2"\n'])
def test_no_header_is_refused(tmp_path, text):
    with pytest.raises(UsageError, match="no header of Nsight Compute"):
        read(tmp_path, text)


def test_a_truncated_file_gives_what_it_holds(tmp_path):
    assert [k.name for k in read(tmp_path, WIDE[: WIDE.index('"1","1","add"') + 20])] == ["gemm"]


def kernel(name, ts, dur, external=7, grid=132, **args):
    args |= {"External id": external, "grid": [grid, 1, 1], "block": [384, 1, 1], "registers per thread": 168}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": args}


def test_pairs_in_a_profiled_run(tmp_path):
    call = {"Collective name": "allreduce", "In msg nelems": 1 << 20, "Out msg nelems": 1 << 20, "dtype": "Float"}
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 1, "args": {"External id": 7,
         "Input Dims": [[64, 32], [32, 16]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}},
        *(kernel("gemm", 100 * i, 10) for i in range(3)),
        kernel("ncclDevKernel_AllReduce", 1000, 500, external=8, grid=24, **call, **{"Group size": 2}),
        kernel("ncclDevKernel_AllReduce", 2000, 300, external=8, grid=24, **call, **{"Group size": 2}),
        *(kernel("gemm", 1010 + 100 * i, 15) for i in range(4)),
        kernel("gemm", 1495, 20),  # half beside it
        kernel("rare", 1400, 5, external=9),
        kernel("rare", 500, 5, external=9),
    ]  # fmt: skip
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = pairs_in(path, "h200-sxm", ranks_per_node=8)
    (s,) = found.samples
    assert (s.base_us, s.overlap_us, s.call, s.bytes, s.channels) == (10, 15, "all_reduce", 4 << 20, 24)
    assert s.call_base_us == 300 and math.isnan(s.call_overlap_us) and s.source == "trace"
    assert s.signature.flops == 2 * 64 * 32 * 16 and s.launch == Launch(132, 384, 168, 0, 1)
    assert (found.runs_partly_covered, found.kernels_alone_only) == (1, 1)


def test_a_trace_without_kernels_is_refused(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": []}')
    with pytest.raises(UsageError, match="no kernel in it"):
        pairs_in(path, "h200-sxm", ranks_per_node=8)
