"""The environment that torchrun gives each worker."""

from __future__ import annotations

from echo_hooks.errors import UsageError


def environment(
    rank: int, world_size: int, nproc_per_node: int, master_addr: str = "127.0.0.1", master_port: int = 29500
) -> dict[str, str]:
    """The variables that torchrun (torch.distributed.elastic.agent.server.local_elastic_agent) sets for one worker.

    Raises UsageError when ``rank`` is not in the world or the nodes are not full.
    """
    if not 0 <= rank < world_size:
        raise UsageError(f"Rank {rank} is not in a world of {world_size} ranks (0 to {world_size - 1}).")
    if nproc_per_node < 1 or (world_size > nproc_per_node and world_size % nproc_per_node):
        raise UsageError(
            f"A world of {world_size} ranks does not fill nodes of {nproc_per_node}; "
            "the world size must be a multiple of --nproc-per-node."
        )
    local_world_size = min(nproc_per_node, world_size)
    node, local_rank = divmod(rank, local_world_size)
    values = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_world_size,
        "GROUP_RANK": node,
        "NODE_RANK": node,
        "GROUP_WORLD_SIZE": world_size // local_world_size,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": master_port,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": "echo",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    return {name: str(value) for name, value in values.items()}
