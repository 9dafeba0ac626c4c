"""DeepSpeed's host files and the options that choose from them; cases are public ones (issue numbers below)."""

from __future__ import annotations

import pytest

from echo_hooks.errors import UsageError
from echo_launch.arguments import Launch, parse
from echo_launch.hostfile import read_hostfile


@pytest.fixture(autouse=True)
def script(clean_environment, tmp_path):
    (tmp_path / "train.py").write_text("pass\n")
    (tmp_path / "hosts").write_text("worker-0 slots=4\nworker-1 slots=4\n")
    return tmp_path


def simulate(*words: str, **environment: str) -> Launch:
    launch = parse(["--simulate", *words, "train.py"], environment)
    assert isinstance(launch, Launch)
    return launch


def world(*words: str, **environment: str) -> tuple[int, int]:
    launch = simulate(*words, **environment)
    return launch.world.world_size, launch.world.nproc_per_node


def refused(*words: str, **environment: str) -> str:
    with pytest.raises(UsageError) as caught:
        simulate(*words, **environment)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- the file ----


def test_comments_blank_lines_tabs_and_line_ends(script):
    (script / "h").write_bytes(b"# all\r\na slots=2\r\n\r\nb\tslots=3  # half\r\n   \r\n")
    assert read_hostfile("h") == {"a": 2, "b": 3}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        # deepspeedai/DeepSpeed#3669: the message did not show the line
        ("a slots=8\nb lots=8\n", "h, line 2: 'b lots=8' is not HOST slots=COUNT"),
        ("a slots=8\na slots=4\n", "h, line 2: 'a slots=4' repeats the host of line 1"),
        ("a slots=2,3\n", "line 1: 'a slots=2,3'"),
        ("a slots=0\n", "slots is a count from 1"),
        ("# nobody\n", "names no host"),
        ("", "names no host"),
        ("a\n", "line 1: 'a'"),
    ],
)
def test_a_bad_line_is_named(script, lines, said):
    (script / "h").write_text(lines)
    assert said in refused("--hostfile", "h")


def test_a_missing_or_unreadable_file_is_an_error_not_a_smaller_job(script):
    # deepspeedai/DeepSpeed#5221
    assert refused("--hostfile", "hostfile_123") == "--hostfile hostfile_123: No such file or directory"
    (script / "binary").write_bytes(b"\xff\xfe\x00a")
    assert "not a text file" in refused("--hostfile", "binary")
    assert "directory" in refused("--hostfile", ".")


# ---- choosing ----


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], (8, 4)),
        (["--include", "worker-1"], (4, 4)),  # deepspeedai/DeepSpeed#6671: no slots means all
        (["--include", "worker-1:0,2"], (2, 2)),
        (["-i", "worker-0:1@worker-1:3"], (2, 1)),
        (["--exclude", "worker-1"], (4, 4)),
        (["-e", "worker-0:0@worker-1:0"], (6, 3)),
        (["--num_nodes", "1"], (4, 4)),
        (["--num_gpus", "2"], (4, 2)),
        (["--num-nodes=1", "--num-gpus=3"], (3, 3)),
        (["--num_accelerators", "1"], (2, 1)),
        (["--include", "worker-1", "--launcher", "slurm", "--no_ssh_check", "--master_port", "1"], (4, 4)),
    ],
)
def test_what_is_chosen(words, expected):
    assert world("--hostfile", "hosts", *words) == expected
    assert world("-H", "hosts", *words) == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--include", "worker-2"], "has no host 'worker-2'; it has worker-0, worker-1"),
        # deepspeedai/DeepSpeed#3624
        (["--include", "worker-1:2,4"], "slots is a count and must be at least 5 to use slot 4"),
        (["--include", "worker-1:x"], "'worker-1:x' is not HOST or HOST:SLOT,SLOT"),
        (["--include", "worker-0", "--exclude", "worker-1"], "exclude each other"),
        (["--include", "worker-0", "--num_gpus", "2"], "exclude each other"),
        (["--exclude", "worker-0@worker-1"], "leaves no host"),
        (["--exclude", "worker-0:0"], "worker-1 has 4 slots and worker-0 has 3"),
        (["--num_nodes", "3"], "has 2 host(s)"),
        (["--num_gpus", "5"], "worker-0 has 4 slot(s)"),
        (["--num_gpus", "many"], "--num_gpus many"),
        (["--world-size", "96"], "--world-size 96 means 96 ranks, but --hostfile hosts means 8 ranks"),
        (["--nnodes", "4", "--nproc-per-node", "8"], "means 32 ranks, but --hostfile hosts means 8 ranks"),
        (["--cluster", "h100-sxm:1x8"], "means 4 ranks a node, but --cluster h100-sxm:1x8 means 8"),
        (["--autotuning", "tune"], "--autotuning"),
    ],
)
def test_what_is_refused(words, said):
    assert said in refused("--hostfile", "hosts", *words)


def test_the_environment_must_agree():
    said = refused("--hostfile", "hosts", WORLD_SIZE="1")
    assert said.startswith("--hostfile hosts means 8 ranks, but WORLD_SIZE in the environment means 1 ranks")


# ---- without a file ----


def test_one_node_without_a_file():
    assert world("--num_gpus", "8") == (8, 8)
    assert world("--include", "localhost:4,5") == (2, 2)
    assert "needs a --hostfile" in refused("--num_nodes", "2", "--num_gpus", "8")
    assert "no accelerator" in refused("--include", "localhost")


def test_visible_devices():
    """deepspeedai/DeepSpeed#5818: CUDA_VISIBLE_DEVICES=0,2 are local ranks 0 and 1."""
    assert world(CUDA_VISIBLE_DEVICES="0,2") == (2, 2)
    assert world("--nproc-per-node", "gpu", CUDA_VISIBLE_DEVICES="4,5,6") == (3, 3)
    assert world("--num_gpus", "4", CUDA_VISIBLE_DEVICES="0,2") == (4, 4)  # DeepSpeed ignores it then
    assert world("--world-size", "16", CUDA_VISIBLE_DEVICES="0,2") == (16, 8)
    assert "how many ranks" in refused(CUDA_VISIBLE_DEVICES="")


# ---- what the script gets ----


def test_the_script_gets_its_local_rank_as_deepspeed_gives_it():
    assert simulate("--hostfile", "hosts").local_rank_argument
    assert not simulate("--hostfile", "hosts", "--no_local_rank").local_rank_argument
    assert not simulate("--world-size", "8").local_rank_argument
