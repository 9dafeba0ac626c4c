"""The table of everything that is replaced in torch.distributed, with the reason of each line."""

from __future__ import annotations

import functools
import warnings
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d

from echo_hooks.errors import UsageError
from echo_hooks.late import LatePatches
from echo_hooks.patching import Patch
from echo_hooks.world import ddp, pipelining
from echo_hooks.world.group import RecordingGroup
from echo_hooks.world.objects import OBJECT_FUNCTIONS
from echo_hooks.world.store import VirtualStore

if TYPE_CHECKING:
    from echo_hooks.world.virtual_world import VirtualWorld

BACKEND = "echo"


def patches(world: VirtualWorld) -> list[Patch]:
    """All replacements, in order of installation."""
    table = [
        *_all("init_process_group", lambda f: _init_process_group(world, f), "the world is virtual: no rendezvous"),
        *_all("_new_process_group_helper", lambda f: _new_process_group_helper(world, f), "groups are recorded"),
        *_all("_new_group_with_tag", lambda f: _new_group_with_tag(world, f), "groups that only members create"),
        *_all("_store_based_barrier", lambda f: _no_barrier, "no peer would ever arrive"),
        *_all("split_group", lambda f: _split_group(world), "C++ would split the inner fake group, or crash"),
        *_all("batch_isend_irecv", _batch_isend_irecv, "one batch is one kernel on NCCL"),
        *_all("TCPStore", lambda f: _store_class(world), "would wait for the other ranks"),
        *_all("FileStore", lambda f: _store_class(world), "would wait for the other ranks"),
        *_all("is_nccl_available", lambda f: lambda: True, "scripts ask before they choose it"),
        *_all("default_pg_nccl_timeout", lambda t: t or c10d.default_pg_timeout, "None on the CPU wheel, which warns"),
        Patch(torch.cuda.nccl, "version", _nccl_version, "asked for with every error; absent from the CPU wheel"),
        *_all("Reducer", lambda c: ddp.reducer_class(world, c), "its timer needs CUDA events"),
        *_all("Logger", lambda c: ddp.logger_class(world, c), "reads the timer"),
        *_all("_verify_params_across_processes", lambda f: ddp.verify_params(world, f), "C++ reads data"),
        *_all("_broadcast_coalesced", lambda f: ddp.broadcast_coalesced(), "C++ passes by the group"),
    ]
    for name in OBJECT_FUNCTIONS:
        why = "sizes of pickled objects would come out of uninitialised memory"
        table += _all(name, lambda f, name=name: _object_function(world, f, name), why)
    if hasattr(c10d, "shrink_group"):
        table += _all("shrink_group", lambda f: _refuse("shrink_group"), "not simulated", since="2.10")
    if not hasattr(c10d, "ProcessGroupNCCL"):
        why = "absent from the CPU wheel, named by scripts for its Options"
        table += [Patch(owner, "ProcessGroupNCCL", lambda f: _NcclStandIn, why, create=True) for owner in (dist, c10d)]
    return table


def _all(name: str, make, why: str, since: str = "") -> list[Patch]:
    """One patch for every module that holds the name; a name that torch has lost fails on installation."""
    owners = [module for module in (c10d, dist, device_mesh) if hasattr(module, name)]
    return [Patch(owner, name, make, why, since) for owner in owners or [c10d]]


def late_patches(world: VirtualWorld) -> list[LatePatches]:
    """Replacements in modules that the script may never import."""
    return [LatePatches("torch.distributed.pipelining.stage", lambda module: pipelining_patches(world, module))]


def pipelining_patches(world: VirtualWorld, module: ModuleType) -> list[Patch]:
    """What is replaced in torch.distributed.pipelining.stage, by version of torch."""
    stage, exchange = module.PipelineStage, world.shape_exchange
    chunks = [
        Patch(module._PipelineStageBase, name, lambda f: pipelining.of_microbatch(world, f), "names its micro-batch")
        for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
    ]
    if hasattr(stage, "_recv_meta"):
        return [
            *chunks,
            Patch(stage, "_recv_meta", exchange.recv_meta, "shapes from a stage that is not there", since="2.13"),
            Patch(stage, "_send_meta", exchange.send_meta, "remembered for stages that follow", since="2.13"),
        ]
    return [
        *chunks,
        Patch(stage, "_shape_inference", exchange.shape_inference, "shapes from a stage that is not there"),
        Patch(stage, "_get_init_p2p_neighbors_ops", pipelining.greetings, "sent as int64, received as float32"),
    ]


# ---- creation of groups ----


@contextmanager
def echo_backend(world: VirtualWorld):
    """Register the backend that makes RecordingGroups; on leaving, torch's registry is as it was."""
    tables: list[Any] = [
        c10d.Backend.backend_list,
        c10d.Backend.default_device_backend_map,
        c10d.Backend.backend_type_map,
        c10d.Backend.backend_capability,
        c10d.Backend._plugins,
    ]
    before = [table.copy() for table in tables]
    c10d.Backend.register_backend(BACKEND, world.create_group, extended_api=True, devices=["cpu", "cuda"])
    try:
        yield
    finally:
        for table, content in zip(tables, before):
            table.clear()
            table.extend(content) if isinstance(table, list) else table.update(content)
        if hasattr(c10d.Backend, BACKEND.upper()):
            delattr(c10d.Backend, BACKEND.upper())


def _init_process_group(world: VirtualWorld, original):
    @functools.wraps(original)
    def init_process_group(
        backend=None, init_method=None, timeout=None, world_size=-1, rank=-1, store=None, *rest, **options
    ):
        for what, given, ours in (("rank", rank, world.rank), ("world_size", world_size, world.recorder.world_size)):
            if given not in (-1, None, ours):
                raise UsageError(
                    f"The script calls init_process_group with {what}={given} at {world.recorder.site()}, but the "
                    f"simulated world says {what}={ours}; take both from the environment."
                )
        with world.recorder.own_time():
            return original(
                backend,
                None,
                timeout,
                world.recorder.world_size,
                world.rank,
                world.store if store is None else store,
                *rest,
                **options,
            )

    return init_process_group


def _new_process_group_helper(world: VirtualWorld, original):
    @functools.wraps(original)
    def new_group_helper(group_size, group_rank, ranks, backend, store, *rest, **options):
        tag = options.get("pg_tag")
        if tag not in (None, "") and c10d._find_pg_by_ranks_and_tag(tag, ranks):
            return original(group_size, group_rank, ranks, backend, store, *rest, **options)
        is_default = not ranks
        members = tuple(ranks) or tuple(range(world.recorder.world_size))
        entry = world.register_group(members, str(backend), options.get("group_desc") or "", default=is_default)
        for name in ("device_id", "backend_options", "pg_options"):
            if name in options:
                options[name] = None
        if world.rank not in members:
            return c10d.GroupMember.NON_GROUP_MEMBER, None
        size, place = len(members), members.index(world.rank)  # MPI's call says -1, -1
        world.creating = (entry, _device_backends(str(backend)))
        store = world.store if store is None else store
        group, group_store = original(size, place, ranks, BACKEND, store, *rest, **options)
        c10d._world.pg_map[group] = (backend, group_store)
        c10d._world.pg_backend_config[group] = ",".join(f"{k}:{v}" for k, v in group.backends.items())
        return group, group_store

    return new_group_helper


def _device_backends(backend: str) -> dict[str, str]:
    """Device type to backend name, as torch reads the string; the default of the accelerator when none was given."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Device capability of hccl unknown, assuming cpu and cuda"
        found = c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map()
    return {str(device): str(name) for device, name in found.items() if _is_device(str(device))}


def _is_device(kind: str) -> bool:
    try:
        torch.device(kind)
    except RuntimeError:  # "npu" before rename_privateuse1_backend
        return False
    return True


def _new_group_with_tag(world: VirtualWorld, original):
    @functools.wraps(original)
    def new_group_with_tag(ranks=None, timeout=None, backend=None, *rest, use_local_synchronization=False, **options):
        with world.recorder.own_time(), world.members_only(use_local_synchronization):
            if use_local_synchronization and ranks is not None and world.rank not in ranks:
                asked = backend or c10d._world.pg_map[c10d._get_default_group()][0]
                ordered = sorted(ranks) if options.get("sort_ranks", True) else ranks
                world.register_group(tuple(ordered), str(asked), options.get("group_desc") or "")
            options["use_local_synchronization"] = use_local_synchronization
            return original(ranks, timeout, backend, *rest, **options)

    return new_group_with_tag


def _split_group(world: VirtualWorld):
    def split_group(parent_pg=None, split_ranks=None, timeout=None, pg_options=None, group_desc=None, backend=None):
        """``split_ranks``: lists of group ranks of the parent."""
        if split_ranks is None or len(split_ranks) == 0:
            raise ValueError("split_ranks cannot be None or empty")
        parent: Any = parent_pg or c10d._get_default_group()
        return world.split_group(parent, split_ranks, timeout=timeout, group_desc=group_desc, backend=backend)

    return split_group


def _batch_isend_irecv(original):
    @functools.wraps(original)
    def batch_isend_irecv(p2p_op_list):
        c10d._check_p2p_op_list(p2p_op_list)
        group = p2p_op_list[0].group or c10d._get_default_group()
        device = p2p_op_list[0].tensor.device
        if not isinstance(group, RecordingGroup) or group.runs_on_host(device):
            return original(p2p_op_list)
        with group.batched(device) as works:
            for op in p2p_op_list:
                peer = {"group_dst" if op.op is c10d.isend else "group_src": op.group_peer}
                op.op(op.tensor, group=op.group, tag=op.tag, **peer)
        return works

    return batch_isend_irecv


def _object_function(world: VirtualWorld, original, name: str):
    replacement = getattr(world.objects, name)
    return functools.wraps(original)(lambda *args, **kwargs: replacement(*args, **kwargs))


def _nccl_version(original):
    return original if hasattr(torch._C, "_nccl_version") else lambda: (2, 28, 9)


def _no_barrier(*args, **kwargs) -> None:
    """Creation of a group ends in a barrier on the store where TORCH_DIST_INIT_BARRIER=1."""


def _refuse(name: str):
    def refuse(*args, **kwargs):
        raise NotImplementedError(f"torch.distributed.{name} is not simulated")

    return refuse


def _store_class(world: VirtualWorld):
    class Store(VirtualStore):
        """Stands for TCPStore and FileStore: same keys for all, nobody to wait for."""

        def __init__(self, *args, **kwargs):
            super().__init__(world)
            world.stores.append(self)  # C++ keeps only its own half of a Python store

    return Store


class _NcclStandIn:
    """Enough of ProcessGroupNCCL for scripts that set its options."""

    class Options:
        def __init__(self, is_high_priority_stream: bool = False):
            self.is_high_priority_stream = is_high_priority_stream
            self.config = _Config()
            self._timeout = None

    class NCCLConfig:
        pass


class _Config:
    """ncclConfig_t: any field may be set."""
