"""A real checkpoint read onto the pretended device: values where they are small, and the memory of a real resume."""

from __future__ import annotations

import gc
import zipfile

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("stage")
ELEMENTS = 300 * 300
WEIGHT = -(-ELEMENTS * 4 // 512) * 512  # what the allocator gives for it


@pytest.fixture
def checkpoint(tmp_path):
    """Saved on a device: the storages say cuda:0. Two tensors share one storage."""
    weight = torch.arange(ELEMENTS, dtype=torch.float32).view(300, 300)
    saved = {"weight": weight, "tied": weight[10:], "step": torch.tensor(7), "lr": 1e-4}
    torch.save(saved, tmp_path / "cpu.pt")
    with zipfile.ZipFile(tmp_path / "cpu.pt") as source, zipfile.ZipFile(tmp_path / "cuda.pt", "w") as target:
        for entry in source.infolist():
            data = source.read(entry)
            if entry.filename.endswith("data.pkl"):  # protocol 2: a text has its length in four bytes before it
                data = data.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")
            target.writestr(entry, data)
    return tmp_path


def allocated(echo) -> int:
    gc.collect()
    return echo.capture.memory.allocator.allocated_bytes


@pytest.mark.parametrize(
    ("file", "location"),
    [
        ("cpu.pt", "cuda"),
        ("cpu.pt", torch.device("cuda", 0)),
        ("cpu.pt", lambda storage, _: storage.cuda(0)),
        ("cuda.pt", None),
        ("cuda.pt", {"cuda:0": "cuda:0"}),
    ],
)
@pytest.mark.parametrize("mmap", [False, True])
def test_onto_the_device(echo, checkpoint, file, location, mmap):
    before = allocated(echo)
    if mmap and file == "cuda.pt":
        pytest.skip("the rewritten file is not aligned for mapping")
    loaded = torch.load(checkpoint / file, map_location=location, mmap=mmap)
    assert loaded["weight"].device == torch.device("cuda", 0) and loaded["weight"].shape == (300, 300)
    assert loaded["tied"].shape == (290, 300) and loaded["tied"].storage_offset() == 3000
    assert loaded["step"].item() == 7 and loaded["lr"] == 1e-4
    assert not [kind for kind in echo.assumptions if "item" in kind]
    assert allocated(echo) == before + WEIGHT + 512  # shared storage once
    del loaded
    assert allocated(echo) == before


def test_onto_the_host(echo, checkpoint):
    loaded = torch.load(checkpoint / "cuda.pt", map_location="cpu")
    assert loaded["weight"][299, 299].item() == ELEMENTS - 1 and allocated(echo) == 0


def test_a_resumed_run_holds_its_states_from_the_start(echo, tmp_path):
    """Megatron-LM PR 4638: a fresh start fits, the resume does not."""
    model = nn.Linear(300, 300, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    real = {
        "state": {0: {name: torch.zeros(300, 300) for name in ("exp_avg", "exp_avg_sq")} | {"step": torch.tensor(3.0)}}
    }
    torch.save({**optimizer.state_dict(), **real}, tmp_path / "optimizer.pt")
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    before = allocated(echo)
    optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt", map_location="cuda"))
    assert allocated(echo) - before in (2 * WEIGHT, 2 * WEIGHT + 512)  # the step counter may go to the host
