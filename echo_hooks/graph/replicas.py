"""How many data-parallel replicas a job has, from the names of its groups: what turns one rank's tokens into all."""

from __future__ import annotations

import numpy as np

from echo_hooks.graph.program import Kind
from echo_hooks.graph.rundir import Run

# Ranks of one "dp-cp" (Megatron) or "dp-sp" (Ulysses) group see different tokens, as the sequence is sharded; device
# meshes name their dimensions by these customs (torchtitan, PyTorch's FSDP2 and HSDP tutorials).
_WHOLE = ("dp-cp", "dp-sp", "dp", "data", "data_parallel", "fsdp", "dp_cp")
_FACTORS = ("dp_replicate", "dp_shard", "replicate", "shard", "cp")
_SAME_TOKENS = ("tp", "tensor", "mp", "pp", "pipeline")


def tokens_per_step(run: Run) -> tuple[int | None, str]:
    """Tokens of one step over all ranks, and how they were counted; None when the groups do not tell.

    A rank's tokens are what its embedding looks up in a step (RankTrace.tokens_per_step).
    """
    trace = max(run.traces.values(), key=lambda t: t.tokens_per_step, default=None)
    if trace is None or not trace.tokens_per_step:
        return None, "no traced rank looks tokens up in an embedding"
    sizes = {g.name: g.size for g in run.groups if trace.rank in g.ranks}
    for name in _WHOLE:
        if name in sizes:
            return trace.tokens_per_step * sizes[name], f"{sizes[name]} data-parallel replicas (group {name})"
    factors = [name for name in _FACTORS if name in sizes]
    if factors:
        width = int(np.prod([sizes[name] for name in factors]))
        return trace.tokens_per_step * width, f"{width} data-parallel replicas (groups {', '.join(factors)})"
    divided = any(size != 1 and (size != run.world_size or name in _SAME_TOKENS) for name, size in sizes.items())
    if not divided and not _sends(run):
        return trace.tokens_per_step * run.world_size, "every rank taken as a data-parallel replica"
    return None, "no group is named as data parallel"


def _sends(run: Run) -> bool:
    return any(np.isin(t.program.kind, (Kind.SEND, Kind.RECV)).any() for t in run.traces.values())
