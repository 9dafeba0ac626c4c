import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_hooks.errors import UsageError
from echo_hooks.hardware.units import parse_quantity


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("400 Gb/s", "bandwidth", 50e9),
        ("400Gbit/s", "bandwidth", 50e9),
        ("3.35 TB/s", "bandwidth", 3.35e12),
        ("1 GiB/s", "bandwidth", 2.0**30),
        ("80 GB", "bytes", 80e9),
        ("4 MiB", "bytes", 4 * 2.0**20),
        ("512 B", "bytes", 512),
        ("1.9 us", "time", 1.9),
        ("1.9 µs", "time", 1.9),
        ("250 ns", "time", 0.25),
        ("3 ms", "time", 3000),
        ("989 TFLOP/s", "flops", 989e12),
        ("1.98 GHz", "frequency", 1.98e9),
        ("1e3 MHz", "frequency", 1e9),
        (" 2 s ", "time", 2e6),
    ],
)
def test_values(text, dimension, value):
    assert parse_quantity(text, dimension) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "dimension", "part"),
    [
        ("400", "bandwidth", "says no unit"),
        (400, "bandwidth", "says no unit"),
        ("-1 us", "time", "is no quantity"),
        ("inf us", "time", "is no quantity"),
        ("nan us", "time", "is no quantity"),
        ("", "time", "is no quantity"),
        ("1e400 s", "time", "too large"),
        ("1e308 s", "time", "too large"),
        ("80 GB", "bandwidth", "no unit of bandwidth"),
        ("80 GB/s", "bytes", "no unit of bytes"),
        ("80 gb", "bytes", "no unit of bytes"),  # bits or bytes? case tells
        ("1_000 us", "time", "is no quantity"),
        ("١ us", "time", "is no quantity"),
        ("9" * 1000 + " us", "time", "is no quantity"),
    ],
)
def test_refused(text, dimension, part):
    with pytest.raises(UsageError, match=part):
        parse_quantity(text, dimension)


# How many of the first unit one of the second is, exactly.
SAME = {
    "bandwidth": [("B/s", "b/s", 8), ("GB/s", "Gb/s", 8), ("TB/s", "GB/s", 1000), ("GiB/s", "MiB/s", 1024)],
    "bytes": [("B", "b", 8), ("GiB", "KiB", 1 << 20), ("TB", "MB", 10**6)],
    "time": [("s", "ms", 1000), ("ms", "us", 1000), ("us", "ns", 1000), ("us", "µs", 1)],
    "flops": [("TFLOP/s", "GFLOP/s", 1000), ("TFLOP/s", "TOP/s", 1)],
    "frequency": [("GHz", "MHz", 1000), ("GHz", "Hz", 10**9)],
}


@given(
    st.floats(1e-12, 1e12),
    st.sampled_from([(dimension, *units) for dimension, pairs in SAME.items() for units in pairs if "b" not in units]),
)
def test_a_number_written_in_any_unit_comes_back(value, same):
    dimension, large, small, factor = same
    one = parse_quantity(f"1 {large}", dimension)
    assert parse_quantity(f"{value!r} {large}", dimension) / one == pytest.approx(value, rel=1e-14)
    assert parse_quantity(f"{value * factor!r} {small}", dimension) == pytest.approx(value * one, rel=1e-14)
