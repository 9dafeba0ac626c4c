"""The command line: whose option is whose, which worlds fit together, and what is refused in one sentence."""

from __future__ import annotations

import os

import pytest

from echo_hooks.errors import UsageError
from echo_launch.arguments import Launch, parse, parse_ranks
from echo_launch.torchrun import RealRun
from echo_launch.world import resolve_world


@pytest.fixture(autouse=True)
def script(tmp_path):
    (tmp_path / "train.py").write_text("pass\n")


def simulate(*words: str, **environment: str) -> Launch:
    launch = parse(["--simulate", *words], environment)
    assert isinstance(launch, Launch)
    return launch


def refused(*words: str, **environment: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse(list(words), environment)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---- the script's arguments ----


def test_everything_after_the_script_is_the_scripts():
    # pytorch/pytorch#120601: torchrun takes prefixes of its own options from behind the script
    words = [
        "--mo",
        "0.9",
        "--log",
        "x",
        "--r",
        "16",
        "--world-size",
        "7",
        "--simulate",
        "--jobs=0",
        "-m",
        "--",
        "--nnodes",
    ]
    launch = simulate("--world-size", "96", "train.py", *words)
    assert launch.args == tuple(words)
    assert launch.world.world_size == 96


@pytest.mark.parametrize(
    "own",
    [
        ["--master-port", "29500", "--world-size=8"],
        ["--master_port=29500", "--world_size", "8"],
        ["-r", "3", "-t3", "--world-size", "8"],
        ["--rdzv_backend", "c10d", "--rdzv-endpoint=a:1", "--rdzv-id", "7", "--world-size", "8", "--standalone"],
        [
            "--max-restarts",
            "3",
            "--log-dir",
            "x",
            "--redirects",
            "1",
            "--tee",
            "2",
            "--node-rank=0",
            "--world-size",
            "8",
        ],
        ["--world-size", "8", "--"],
    ],
)
def test_torchruns_options_in_both_spellings(own):
    launch = simulate(*own, "train.py", "--lr", "-1")
    assert (launch.world.world_size, launch.script, launch.args) == (8, "train.py", ("--lr", "-1"))


def test_a_module_is_looked_up_without_importing_it(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("raise SystemExit('imported')\n")
    assert simulate("--world-size", "8", "-m", "pkg.train", "-x").module
    assert "no module 'nope'" in refused("--simulate", "--world-size", "8", "-m", "nope.train")


# ---- the world ----


@pytest.mark.parametrize(
    "words, size, per_node, cluster",
    [
        (["--world-size", "96"], 96, 8, "h100-sxm:12x8"),
        (["--world-size", "4"], 4, 4, "h100-sxm:1x4"),
        (["--nproc-per-node", "4"], 4, 4, "h100-sxm:1x4"),
        (["--nnodes", "2", "--nproc-per-node", "4"], 8, 4, "h100-sxm:2x4"),
        (["--nnodes", "2:2", "--nproc_per_node=4"], 8, 4, "h100-sxm:2x4"),
        (["--nnodes", "3"], 3, 1, "h100-sxm:3x1"),
        (["--world-size", "12", "--nnodes", "3"], 12, 4, "h100-sxm:3x4"),
        (["--world-size", "96", "--nproc-per-node", "4"], 96, 4, "h100-sxm:24x4"),
        (["--cluster", "h800:12x8"], 96, 8, "h800:12x8"),
        (["--nnodes", "12", "--nproc-per-node", "gpu", "--cluster", "h800:12x8"], 96, 8, "h800:12x8"),
        (["--nproc-per-node", "auto", "--cluster", "h800:12x8"], 96, 8, "h800:12x8"),
    ],
)
def test_worlds(words, size, per_node, cluster):
    world = simulate(*words, "train.py").world
    assert (world.world_size, world.nproc_per_node, world.cluster) == (size, per_node, cluster)
    assert ("no --cluster was given" in world.note) == ("--cluster" not in words)


def test_environment_agrees_or_stands_for_the_flags():
    assert simulate("--world-size", "16", "train.py", WORLD_SIZE="16", LOCAL_WORLD_SIZE="8").world.world_size == 16
    assert simulate("train.py", WORLD_SIZE="16").world.world_size == 16
    assert simulate("train.py", PET_NNODES="2", PET_NPROC_PER_NODE="4").world.world_size == 8
    assert simulate("--nnodes", "3", "train.py", PET_NNODES="2", PET_NPROC_PER_NODE="4").world.world_size == 12


@pytest.mark.parametrize(
    "words, environment, both",
    [
        (["--world-size", "96", "--nnodes", "2", "--nproc-per-node", "8"], {}, ("96", "16")),
        (["--world-size", "96"], {"WORLD_SIZE": "8"}, ("96", "WORLD_SIZE in the environment means 8")),
        (["--world-size", "96", "--cluster", "h800:2x8"], {}, ("96", "--cluster h800:2x8 means 16")),
        (["--world-size", "16", "--cluster", "h800:12x8"], {}, ("16", "96")),
        (["--cluster", "h800:2x8", "--nproc-per-node", "4"], {}, ("4 ranks a node", "8 ranks a node")),
        (["--world-size", "8"], {"LOCAL_WORLD_SIZE": "4", "PET_NPROC_PER_NODE": "8"}, ("PET_NPROC_PER_NODE 8", "4")),
    ],
)
def test_sources_that_disagree_are_both_shown(words, environment, both):
    message = refused("--simulate", *words, "train.py", **environment)
    assert all(part in message for part in both), message


@pytest.mark.parametrize(
    "words, part",
    [
        ([], "how many ranks"),
        (["--world-size", "0"], "--world-size 0: a whole number from 1"),
        (["--world-size", "-8"], "--world-size -8"),
        (["--world-size", "eight"], "eight"),
        (["--world-size", "8000000"], "at most 1000000"),
        (["--world-size", "9" * 5000], "a whole number from 1"),
        (["--world-size", "12"], "does not fill nodes of 8"),
        (["--world-size", "12", "--nnodes", "5"], "cannot be spread evenly"),
        (["--nnodes", "1:4", "--nproc-per-node", "8"], "elastic"),
        (["--nnodes", "two"], "--nnodes is 'two'"),
        (["--nproc-per-node", "gpu"], "no accelerator"),
        (["--nproc-per-node", "0"], "--nproc-per-node is '0'"),
        (["--cluster", "h900:2x8"], "h900"),
        (["--cluster", "nowhere.toml"], "nowhere.toml"),
        (["--world-size", "8", "--steps", "0"], "--steps 0"),
        (["--world-size", "8", "--warmup-steps", "-1"], "--warmup-steps -1"),
        (["--world-size", "8", "--jobs", "0"], "--jobs 0"),
        (["--world-size", "8", "--seed", "x"], "--seed x"),
        (["--world-size", "8", "--trace-ranks", "8"], "0 to 7"),
        (["--world-size", "8", "--trace-ranks", "some"], "some"),
        (["--world-size", "8", "--no-python"], "--no-python"),
        (["--world-size", "8", "--host-speed", "fast"], "a factor from 0.01 to 100 is needed"),
        (["--world-size", "8", "--timing", "guess"], "guess"),
        (["--world-size", "8", "--profiles", "mine.parquet"], "mine.parquet: no such file"),
        (["--world-size", "8", "--timing", "model", "--profiles", "mine.parquet"], "with --timing profile, not with"),
        (["--world-size", "8", "--calibration", "cal.toml"], "cal.toml: No such file"),
        (["--world-size", "8", "--overlap", "model.ubj"], "model.ubj: No such file"),
        (["--world-size", "8", "--jitter", "3"], "--jitter 3: a number from 0 to 2"),
        (["--world-size", "8", "--slow-node", "3"], "NUMBER=FACTOR"),
        (["--world-size", "8", "--slow-node", "3=1.1"], "3 is outside 0 to 0"),
        (["--world-size", "8", "--slow-rank", "8=1.1"], "8 is outside 0 to 7"),
        (["--world-size", "8", "--moe-skew", "2"], "hot=FACTOR"),
        (["--world-size", "8", "--moe-skew", "hot=0.5"], "a factor from 1"),
        (["--world-size", "8", "--executor", "ray"], "not built yet"),
        (["--world-sizes", "8"], "unrecognized arguments"),
        (["--world-size"], "no script"),
    ],
)
def test_refusals(words, part):
    assert part in refused("--simulate", *words, "train.py")


def test_slow_nodes_and_noise():
    words = ["--slow-node", "1=1.1", "--slow_node=0-1=2", "--slow-rank", "15=1.5", "--jitter", "2.5%"]
    launch = simulate("--world-size", "16", *words, "train.py")
    assert launch.jitter == 0.025
    assert launch.slow_ranks == pytest.approx({r: 2.0 if r < 8 else 3.3 if r == 15 else 2.2 for r in range(16)})
    assert simulate("--world-size", "8", "train.py").slow_ranks == {}


@pytest.mark.parametrize("given", ["missing.py", "folder", "pipe"])
def test_scripts_that_are_none(tmp_path, given):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    message = refused("--simulate", "--world-size", "8", given)
    assert message.startswith(given)


def test_no_script():
    assert "no script" in refused("--simulate", "--world-size", "8")
    assert "no script" in refused("--nnodes", "2")


def test_unreadable_script(tmp_path, monkeypatch):
    def deny(self, *_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", deny)
    assert refused("--simulate", "--world-size", "8", "train.py") == "train.py cannot be read: Permission denied"


# ---- without --simulate ----


def test_torchrun_gets_the_very_arguments():
    words = ["--nnodes=2", "--nproc_per_node", "8", "train.py", "--simulate"]
    assert parse(words, {}) == RealRun(tuple(words), "train.py")
    own = ["--record", "r", "--nnodes=2", "--profile=3", "-m", "train", "--record", "its"]
    assert parse(own, {}) == RealRun(("--nnodes=2", "-m", "train", "--record", "its"), "train", "r", 3)


def test_options_of_the_record_need_a_real_run():
    assert "leave out --simulate" in refused("--simulate", "--world-size", "8", "--record", "r", "train.py")
    assert "--profile 0" in refused("--profile", "0", "train.py")


@pytest.mark.parametrize("words", [["--world-size", "8"], ["--cluster=h800:1x8"], ["--json"], ["--steps", "3"]])
def test_simulation_options_need_simulate(words):
    assert "add --simulate" in refused(*words, "train.py")


# ---- lists of ranks ----


def test_rank_lists():
    assert parse_ranks("auto", 8) is None
    assert parse_ranks("all", 3) == (0, 1, 2)
    assert parse_ranks("0,5,95", 96) == (0, 5, 95)
    assert parse_ranks("0-3, 2,7", 8) == (0, 1, 2, 3, 7)
    assert parse_ranks("0-88:8,95", 96) == (*range(0, 89, 8), 95)


@pytest.mark.parametrize("text", ["", "1,", "-1", "3-1", "0-8", "1:2", "0-6:0", "0-6:", "²", "1-2-3"])
def test_bad_rank_lists(text):
    with pytest.raises(UsageError):
        parse_ranks(text, 8)


# ---- the local accelerator ----


def test_a_known_local_accelerator_is_the_default(monkeypatch):
    monkeypatch.setattr("echo_launch.world.local_accelerators", lambda: ["NVIDIA A100-SXM4-80GB"] * 2)
    world = resolve_world(world_size=None, nnodes="2", nproc_per_node="gpu", cluster=None, environment={})
    assert (world.world_size, world.cluster) == (4, "a100-80gb:2x2")
    assert "this machine has NVIDIA A100-SXM4-80GB" in world.note


def test_an_unknown_local_accelerator_is_not():
    world = resolve_world(world_size=8, nnodes=None, nproc_per_node=None, cluster=None, environment={})
    assert world.cluster == "h100-sxm:1x8"
