from __future__ import annotations

import pytest
import torch
from fakes import H100, Pretend

from echo_hooks.devices.allocator import CachingAllocator
from echo_hooks.devices.pretended_cuda import PretendedCuda
from echo_hooks.graph.recorder import Recorder


@pytest.fixture(scope="module")
def installed():
    """Eight pretended H100s, of which this is rank 3's; one installation for all tests of a file."""
    recorder = Recorder(rank=3, world_size=8)
    device = PretendedCuda(recorder, H100, device_count=8, local_rank=3, allocator=CachingAllocator(H100.memory_bytes))
    device.install()
    yield device
    device.remove()


@pytest.fixture
def cuda(installed):
    """The installed device with a new recorder and allocator, device 0 and the default stream current."""
    installed.retarget(Recorder(rank=3, world_size=8), 3, CachingAllocator(H100.memory_bytes))
    torch.cuda.set_device(0)
    torch.cuda.set_stream(torch.cuda.default_stream())
    yield installed
    torch.cuda.set_device(0)
    torch.set_default_device(None)


@pytest.fixture
def recorder(cuda):
    return cuda._state.recorder


@pytest.fixture
def mode(cuda):
    with Pretend() as mode:
        yield mode
