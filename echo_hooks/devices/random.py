"""Random number generators of the pretended device: CPU generators inside, CUDA generators to the script."""

from __future__ import annotations

import struct

import torch

from echo_hooks import host_tensors
from echo_hooks.devices.state import active
from echo_hooks.devices.tables import always, choose_by_device
from echo_hooks.patching import Patch

# ATen/cuda/CUDAGeneratorImpl.h (default_rng_seed_val of c10/core/GeneratorImpl.h); its state is a 64-bit seed and a
# 64-bit Philox offset, little-endian, and the offset must be a multiple of 4.
_DEFAULT_SEED = 67280421310721
_STATE = struct.Struct("<Qq")


class CudaGenerator(torch.Generator):
    """Stands in for a torch.Generator of a CUDA device.

    It is a CPU generator (so that known small values can be drawn for real) which says that it lives on
    ``cuda:index`` and whose state has the 16-byte form of a CUDA generator's.
    """

    _device: torch.device
    _seed: int
    _offset: int

    def __new__(cls, index: int = 0):
        generator = torch.Generator.__new__(cls)
        generator._device = torch.device("cuda", index)
        generator._seed, generator._offset = _DEFAULT_SEED, 0
        return generator

    def __init__(self, index: int = 0):
        pass

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device

    def manual_seed(self, seed: int):
        self._seed, self._offset = int(seed) % 2**64, 0
        super().manual_seed(self._seed)
        return self

    def seed(self) -> int:
        # The CPU's generator decides: the same in every run that seeds it, as every deterministic script does.
        seed = int(torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device="cpu"))
        self.manual_seed(seed)
        return seed

    def initial_seed(self) -> int:
        return self._seed

    def get_offset(self) -> int:
        return self._offset

    def set_offset(self, offset: int):
        if offset % 4:
            raise RuntimeError("offset must be a multiple of 4")
        self._offset = offset
        # Equal seed and offset must draw equal values: mix both into the generator underneath.
        super().manual_seed((self._seed + 0x9E3779B97F4A7C15 * offset) % 2**64)
        return self

    def get_state(self) -> torch.Tensor:
        return host_tensors.from_bytes(_STATE.pack(self._seed, self._offset), torch.uint8)

    def set_state(self, new_state: torch.Tensor):
        if new_state.numel() != _STATE.size or new_state.dtype != torch.uint8:
            raise RuntimeError("RNG state is wrong size")
        seed, offset = _STATE.unpack(new_state.cpu().numpy().tobytes())
        self.manual_seed(seed)
        self.set_offset(offset)
        return self

    def clone_state(self):
        return CudaGenerator(self._device.index or 0).set_state(self.get_state())

    graphsafe_get_state = clone_state

    def graphsafe_set_state(self, state):
        return self.set_state(state.get_state())

    def __reduce__(self):
        return (_restored, (self._device.index, self._seed, self._offset))


def random_patches(device_count: int) -> list[Patch]:
    """Generators. The functions of ``torch.cuda.random`` are torch's own: they ask ``default_generators``."""
    why = "no CUDA generator can be made"
    defaults = tuple(CudaGenerator(index) for index in range(device_count))
    for generator in defaults:
        generator.manual_seed(_DEFAULT_SEED)
    choose = choose_by_device(torch.Generator, _generator, default="cpu")
    return [
        Patch(torch.cuda, "default_generators", always(defaults), why),
        Patch(torch, "Generator", always(choose), why),
        Patch(torch._C, "Generator", always(choose), why),
    ]


def _generator(device) -> CudaGenerator:
    index = device if isinstance(device, int) else torch.device(device).index
    return CudaGenerator(active().device if index is None else index)


def _restored(index: int, seed: int, offset: int) -> CudaGenerator:
    generator = CudaGenerator(index)
    generator.manual_seed(seed)
    generator.set_offset(offset)
    return generator
