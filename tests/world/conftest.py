from __future__ import annotations

import pytest
import torch.distributed as dist
from virtual_rank import Run

from echo_hooks.world import PayloadStore


@pytest.fixture
def world():
    """Factory of runs; ``init`` makes the default group. Whatever is open is closed again."""
    open_runs: list[Run] = []
    shared = PayloadStore(None)

    def make(rank: int = 1, world_size: int = 4, backend: str | None = "gloo", init: bool = True, **options) -> Run:
        while open_runs:
            open_runs.pop().world.remove()
        run = Run(rank, world_size, options.pop("payloads", shared), **options)
        run.world.install()
        open_runs.append(run)
        if init:
            dist.init_process_group(backend)
        return run

    yield make
    while open_runs:
        open_runs.pop().world.remove()
