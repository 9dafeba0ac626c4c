from __future__ import annotations

from types import SimpleNamespace

import pytest
from fakes import H100

from echo_hooks.devices.accelerator_interface import open_device
from echo_hooks.devices.allocator import CachingAllocator
from echo_hooks.devices.pretended_cuda import PretendedCuda
from echo_hooks.devices.properties import properties
from echo_hooks.errors import UsageError
from echo_hooks.graph.recorder import Recorder

ARGUMENTS = {"device_count": 8, "local_rank": 0, "allocator": CachingAllocator(2**30)}


def test_kinds_of_device():
    recorder = Recorder(0, 8)
    assert isinstance(open_device("pretended", recorder, H100, **ARGUMENTS), PretendedCuda)
    cpu = open_device("cpu", recorder, H100, **ARGUMENTS)
    cpu.install(), cpu.remove()
    for kind in ("cuda", "npu"):
        with pytest.raises(NotImplementedError, match=f"real {kind} device"):
            open_device(kind, recorder, H100, **ARGUMENTS)
    with pytest.raises(ValueError, match="device kind 'tpu'"):
        open_device("tpu", recorder, H100, **ARGUMENTS)


def test_what_cannot_be_pretended_is_refused():
    ascend = SimpleNamespace(**{**vars(H100), "name": "ascend-910b", "vendor": "huawei"})
    with pytest.raises(NotImplementedError, match="ascend-910b is not a CUDA device"):
        PretendedCuda(Recorder(0, 8), ascend, **ARGUMENTS)
    with pytest.raises(UsageError, match="local rank 8 of 8"):
        PretendedCuda(Recorder(0, 8), H100, **{**ARGUMENTS, "local_rank": 8})


def test_a_process_that_has_used_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda._initialized", True)
    with pytest.raises(UsageError, match="has used a real GPU already"):
        PretendedCuda(Recorder(0, 8), H100, **ARGUMENTS).install()


def test_one_device_at_a_time(installed):
    with pytest.raises(RuntimeError, match="installed already"):
        PretendedCuda(Recorder(0, 8), H100, **ARGUMENTS).install()


def test_amd_answers_as_gfx942():
    mi300x = SimpleNamespace(**{**vars(H100), "name": "mi300x", "vendor": "amd", "compute_capability": None})
    found = properties(mi300x, 0)
    assert (found.major, found.minor, found.warp_size, found.gcnArchName) == (9, 4, 64, "gfx942")
