"""``torch.compile`` and CUDA graphs: what would turn the script's ops into something else than it issues."""

from __future__ import annotations

import torch

from echo_hooks.devices.state import active
from echo_hooks.devices.tables import always, bindings, everywhere
from echo_hooks.patching import Patch


def compilation_patches() -> list[Patch]:
    """torch.compile is left out, CUDA graphs are refused."""
    why = "a graph is captured once and replayed without the host"
    return [
        Patch(torch, "compile", always(compile), "a compiler needs a device to compile for"),
        *everywhere(
            (torch.cuda.graphs, torch.cuda),
            {"CUDAGraph": CUDAGraph, "make_graphed_callables": make_graphed_callables},
            why,
        ),
        *everywhere(
            (torch.cuda.graphs, torch.cuda),
            {"graph_pool_handle": graph_pool_handle, "is_current_stream_capturing": lambda: False},
            why,
        ),
        *bindings({"_cuda_isCurrentStreamCapturing": lambda: False}, why),
    ]


def compile(model=None, **options):
    """Stands in for torch.compile: the identity, also as a decorator with options."""
    active().note(
        "torch.compile was left out: the ops are those of the uncompiled model, without the fusion of its kernels"
    )
    return (lambda function: function) if model is None else model


class CUDAGraph:
    """Stands in for torch.cuda.CUDAGraph: may be made, reset and kept, but not used."""

    def __init__(self, keep_graph: bool = False):
        self._pool = graph_pool_handle()

    def capture_begin(self, *args, **kwargs):
        raise NotImplementedError(_GRAPHS)

    capture_end = instantiate = replay = capture_begin

    def reset(self) -> None:
        return None

    def pool(self) -> tuple[int, int]:
        return self._pool

    def register_generator_state(self, generator) -> None:
        return None

    def enable_debug_mode(self) -> None:
        return None


def make_graphed_callables(*args, **kwargs):
    """Stands in for torch.cuda.make_graphed_callables."""
    raise NotImplementedError(_GRAPHS)


_GRAPHS = "CUDA graphs are not simulated: run the script without them (its launches then count as host time)"
_pools = [0]


def graph_pool_handle() -> tuple[int, int]:
    """Stands in for torch.cuda.graph_pool_handle."""
    _pools[0] += 1
    return (0, _pools[0])
