"""Illegal layouts as people meet them: the framework's own error with rank and line, one line of arithmetic before it.

Megatron's single rules are in tests/integrations/test_megatron_layouts.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from echo_launch.main import main

CASES = Path(__file__).parent
EXAMPLES = CASES.parent.parent / "examples"
SIZES = "--layers 8 --hidden 64 --heads 4 --seq 32 --vocab 128 --micro-batch 2"


def refusal(script: Path, world: int, words: str, capfd) -> tuple[str, str]:
    """(the line of arithmetic, all of stderr) of a run that the script itself ends."""
    status = main(["--simulate", "--world-size", str(world), "--quiet", str(script), *words.split()])
    err = capfd.readouterr().err
    assert status == 1, err
    lines = [line for line in err.splitlines() if line.startswith("layout: ")]
    assert len(lines) == 1 and err.index(lines[0]) < err.index("Traceback")
    assert f'/{script.name}", line ' in err and "echo-launch: rank 0: " in err
    assert f"/{'echo_hooks'}/" not in err
    return lines[0], err


def test_a_mesh_larger_than_the_world(here, capfd):
    line, err = refusal(CASES / "large_mesh.py", 8, "4 4", capfd)
    assert line == "layout: mesh dp 4 x tp 4 = 16, but the world is 8; nearest legal: tp 2, or dp 2, or world 16"
    assert "Mesh should not be bigger than default world size 8" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "words", "said"),
    [
        # THUDM/slime#1818
        (8, "--ep 8 --pp 2 --experts 8 --micro-batches 2",
         "world 8 is no multiple of ETP (default: TP) 1 x EP 8 x PP 2 = 16; nearest legal: EP 4"),
        # NVIDIA-NeMo/Megatron-Bridge#546: expert TP follows TP
        (4, "--tp 4 --ep 4 --experts 4 --sequence-parallel",
         "world 4 is no multiple of ETP (default: TP) 4 x EP 4 x PP 1 = 16"),
        (8, "--ep 4 --experts 6", "6 experts / EP 4 = 1.5"),
        (8, "--pp 4 --micro-batches 4 --layers 30", "30 layers / PP 4 = 7.5"),
        (8, "--tp 4 --sequence-parallel --seq 30", "30 positions / TP 4 = 7.5"),
        # verl-project/verl PR 1617
        (8, "--pp 2 --vpp 2 --micro-batches 5", "5 micro-batches / PP 2 = 2.5, not whole; nearest legal: PP 1 or PP 5"),
    ],
)  # fmt: skip
def test_megatron(world, words, said, here, capfd):
    pytest.importorskip("megatron.core")
    line, _ = refusal(EXAMPLES / "train_mcore.py", world, f"{SIZES} {words}", capfd)
    assert said in line


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 96])
def test_batch_sizes_of_deepspeed(world, here, capfd):
    """bigcode-project/starcoder#77: 64 is 4 x 8 x 2, and 4 x 8 x 96 would be 3072."""
    pytest.importorskip("deepspeed")
    script = CASES / "deepspeed_batch.py"
    if world == 2:
        assert main(["--simulate", "--world-size", "2", "--trace-ranks", "0", "--quiet", str(script)]) == 0
        return
    line, _ = refusal(script, world, "", capfd)
    assert line == (
        "layout: train_batch_size 64 is not 4 (train_micro_batch_size_per_gpu) x 8 (gradient_accumulation_steps) x 96 "
        "(data-parallel world that DeepSpeed sees) = 3072; nearest legal: train_batch_size 3072"
    )


@pytest.mark.slow
def test_layers_built_and_configured(here, capfd):
    """NVIDIA/Megatron-LM#1304, #468: fewer layers are built than were configured, and nothing says so."""
    pytest.importorskip("megatron.core")
    words = SIZES.replace("--layers 8", "--layers 6").split()
    script = str(CASES / "floored_layers.py")
    status = main(["--simulate", "--world-size", "4", script, *words, "--pp", "4", "--micro-batches", "4"])
    out, err = capfd.readouterr()
    assert status == 3, err
    assert "4 layers are built of 6 configured" in " ".join((out + err).split())
    assert "have 1/1/1/1" in " ".join((out + err).split())
