from importlib.resources import files

import pytest

from echo_hooks.errors import UsageError
from echo_hooks.hardware.accelerator import EFFICIENCY, accelerator_names, load_accelerator

PRESETS = ["a100-40gb", "a100-80gb", "ascend-910b", "ascend-910c", "b200", "h100-sxm", "h200-sxm", "h800", "mi300x"]

# Dense bfloat16 peak in TFLOP/s, memory in TB/s, scale-up in GB/s one way: from the datasheets, read a second time.
DATASHEET = {
    "a100-40gb": (312, 1.555, 300),
    "a100-80gb": (312, 2.039, 300),
    "h100-sxm": (989.4, 3.35, 450),
    "h200-sxm": (989.4, 4.8, 450),
    "h800": (989.4, 3.35, 200),
    "b200": (2250, 8.0, 900),
    "mi300x": (1307.4, 5.3, 448),
    "ascend-910b": (313, 1.6, 196),
    "ascend-910c": (390, 1.6, 196),  # a die, half a package
}


def preset(name: str) -> str:
    return (files("echo_hooks.hardware.accelerators") / f"{name}.toml").read_text()


def test_the_presets():
    assert accelerator_names() == PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_the_datasheets(name):
    accelerator = load_accelerator(name)
    assert accelerator.name == name
    tflops, terabytes, gigabytes = DATASHEET[name]
    assert accelerator.peak_flops["bfloat16"] == pytest.approx(tflops * 1e12)
    assert accelerator.memory_bandwidth_bytes_per_s == pytest.approx(terabytes * 1e12)
    assert accelerator.scaleup_bandwidth_bytes_per_s == pytest.approx(gigabytes * 1e9)
    assert set(accelerator.efficiency) == set(EFFICIENCY)


@pytest.mark.parametrize("name", PRESETS)
def test_every_number_says_where_it_is_from(name):
    accelerator = load_accelerator(name)
    numbers = {f"peak.{dtype}" for dtype in accelerator.peak_flops}
    numbers |= {f"efficiency.{c}.{key}" for c, keys in accelerator.efficiency.items() for key in keys}
    numbers |= {"multiprocessors", "memory", "memory_bandwidth", "l2", "launch_overhead", "host_launch"}
    numbers |= {"special_function_rate", "host_link_bandwidth", "scaleup_bandwidth"}
    assert set(accelerator.sources) == numbers
    assert all(source.strip() for source in accelerator.sources.values())


def test_h800_is_an_h100_with_fewer_links_and_no_float64():
    h100, h800 = load_accelerator("h100-sxm"), load_accelerator("h800")
    assert h800.peak_flops == h100.peak_flops | {"float64": 1e12}
    assert h800.multiprocessors == h100.multiprocessors == 132


def test_what_was_measured_on_another_device_is_marked_assumed():
    assert load_accelerator("h100-sxm").sources["efficiency.gemm.compute"].startswith("assumed")
    assert not load_accelerator("h200-sxm").sources["efficiency.gemm.compute"].startswith("assumed")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('memory_bandwidth = { value = "3.35 TB/s"', 'memory_bandwidth = { value = "3.35 TB"', "no unit of bandwidth"),
        ('memory_bandwidth = { value = "3.35 TB/s"', "memory_bandwidth = { value = 3.35", "says no unit"),
        ('memory_bandwidth = { value = "3.35 TB/s"', 'memory_bandwidth = { value = "0 TB/s"', "above zero"),
        ('memory_bandwidth = { value = "3.35 TB/s"', 'memory_bandwidth = { value = "-3 TB/s"', "is no quantity"),
        ("memory_bandwidth =", "memory_bandwith =", "memory_bandwidth: missing"),
        ("multiprocessors = { value = 132", "multiprocessors = { value = 132.5", "should be a whole number"),
        ("multiprocessors = { value = 132", "multiprocessors = { value = true", "should be a whole number"),
        ("dense = true", "dense = false", "dense: False should be true"),
        ("dense = true\n", "", "peak.dense: missing"),
        ("bfloat16 =", "bf16 =", "bf16: unknown key"),
        ("float32 =", "float33 =", "float32: missing"),
        ('direction = "one way", ', "", 'direction: missing; "one way"'),
        ('direction = "one way"', 'direction = "both ways"', 'should be "one way"'),
        ('vendor = "nvidia"', 'vendor = "nvidea"', "should be one of nvidia"),
        ("format = 1", "format = 2", "should be 1"),
        ("[9, 0]", "[9]", r"should be \[major, minor\]"),
        ('like = "h200-sxm"', 'like = "h100-sxm"', "takes its numbers from elsewhere"),
        ('like = "h200-sxm"', 'like = "h900"', "is no preset"),
        ("[efficiency]", "[efficiency]\ngemm.compute = {value = 1.5, source = 'x'}", "at most 1"),
        ("[efficiency]", "[efficiency]\ngemn = {}", "gemn: unknown key"),
        ("[efficiency]", "[efficiency]\ngemm.tile = 3", "gemm.tile: unknown key"),
        ('band = ["79.1 GiB", "79.65 GiB"]', 'band = ["1 GiB", "2 GiB"]', "does not hold the value"),
        ('band = ["79.1 GiB", "79.65 GiB"]', "band = 3", r"should be \[low, high\]"),
        ("format = 1", "format = 1\nnote = 'x'", "note: unknown key"),
        ("format = 1", "format = = 1", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_file_and_key(tmp_path, old, new, says):
    text = preset("h100-sxm")
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UsageError, match=says) as error:
        load_accelerator(str(path))
    assert str(path) in str(error.value)


def test_a_number_without_source_is_refused(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(preset("h100-sxm").replace(', source = "NVIDIA H100 datasheet, SXM"', "", 1))
    with pytest.raises(UsageError, match=r"memory_bandwidth\.source: missing"):
        load_accelerator(str(path))


def test_own_efficiency_beside_a_presets(tmp_path):
    path = tmp_path / "mine.toml"
    own = '\n[efficiency.gemm]\ncompute = { value = 0.5, source = "own measurement" }\n'
    path.write_text(preset("h100-sxm") + own)
    mine, h200 = load_accelerator(str(path)), load_accelerator("h200-sxm")
    assert mine.efficiency["gemm"] == h200.efficiency["gemm"] | {"compute": 0.5}
    assert mine.efficiency["norm"] == h200.efficiency["norm"]
    assert mine.sources["efficiency.gemm.compute"] == "own measurement"


def test_unknown_name_suggests_a_near_one(tmp_path):
    with pytest.raises(UsageError, match="did you mean 'h100-sxm'"):
        load_accelerator("h100sxm")
    with pytest.raises(UsageError, match="No such file"):
        load_accelerator(str(tmp_path / "none.toml"))
    with pytest.raises(UsageError, match="unknown accelerator"):
        load_accelerator("../h800")


def test_hostile_files(tmp_path):
    path = tmp_path / "mine.toml"
    for content in (b"", b"\xff\xfe\x00", b"a = " + b"[" * 100_000, b"#" * (2 << 20)):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"mine\.toml"):
            load_accelerator(str(path))
    with pytest.raises(UsageError, match="directory"):
        (tmp_path / "folder.toml").mkdir()
        load_accelerator(str(tmp_path / "folder.toml"))
