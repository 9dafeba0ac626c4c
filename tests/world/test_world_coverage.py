"""Recorded or refused: every call that torch has, taken from torch itself."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the legacy namespace
from virtual_rank import device

from echo_hooks.world.functional import NAMESPACES, Functional
from echo_hooks.world.group import RecordingGroup

# ProcessGroup's methods that communicate nothing: answered by the C++ base class or its inner fake group.
SILENT = {
    "BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL", "_backend_id", "_device_types",
    "_enable_collectives_timing", "_get_backend", "_get_backend_name", "_has_hooks", "_id", "_pybind11_conduit_v1_",
    "_register_backend", "_register_on_completion_hook", "_set_default_backend", "_set_group_desc", "_set_group_name",
    "_wait_for_pending_works", "_add_ephemeral_timeout", "abort", "bound_device_id", "boxed", "get_backend",
    "get_group_store", "group_desc", "group_name", "name", "rank", "register_abort_hook", "register_post_hook",
    "register_pre_hook", "set_timeout", "shutdown", "size", "supports_reconfigure", "supports_window", "unbox",
    "unregister_abort_hook", "unregister_post_hook", "unregister_pre_hook", "use_pg_for_symm_mem_rendezvous",
}  # fmt: skip


def test_every_method_of_process_group_is_overridden_or_silent():
    methods = {n for n in dir(dist.ProcessGroup) if not n.startswith("__")}
    assert methods - SILENT <= set(vars(RecordingGroup)), "new methods of ProcessGroup"


def test_old_and_new_names_are_the_same_method():
    for old, new in (
        ("_allgather_base", "all_gather_single"),
        ("_reduce_scatter_base", "reduce_scatter_single"),
        ("alltoall_base", "all_to_all_single"),
        ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
        ("gather_into_tensor", "gather_single"),
        ("recv_anysource", "recvAnysource"),
        ("_start_coalescing", "start_coalescing"),
        ("split_group", "splitGroup"),
    ):
        assert vars(RecordingGroup)[old] is vars(RecordingGroup)[new]


@pytest.mark.parametrize("name", ["merge_remote_group", "reconfigure", "get_reconfigure_handle", "new_window"])
def test_what_is_not_simulated_says_so(world, name):
    world()
    with pytest.raises(NotImplementedError, match=name):
        getattr(dist.group.WORLD, name)()


def ones(*shape):
    return torch.ones(shape)


# One example of each communicating function in distributed_c10d.__all__ (rank 1 of 4, gloo).
EXAMPLES = {
    "all_gather": lambda: dist.all_gather([ones(1) for _ in range(4)], ones(1)),
    "all_gather_coalesced": lambda: dist.all_gather_coalesced([[ones(1)] for _ in range(4)], [ones(1)]),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(ones(4), ones(1)),
    "all_gather_object": lambda: dist.all_gather_object([None] * 4, 1),
    "all_gather_single": lambda: dist.all_gather_single(ones(4), ones(1)),
    "all_reduce": lambda: dist.all_reduce(ones(1)),
    "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([ones(1), ones(2)]),
    "all_to_all": lambda: dist.all_to_all([ones(1) for _ in range(4)], [ones(1) for _ in range(4)]),
    "all_to_all_single": lambda: dist.all_to_all_single(ones(4), ones(4)),
    "barrier": lambda: dist.barrier(),
    "batch_isend_irecv": lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, ones(1), 0)]),
    "broadcast": lambda: dist.broadcast(ones(1), 0),
    "broadcast_object_list": lambda: dist.broadcast_object_list([1], 0),
    "gather": lambda: dist.gather(ones(1), None, 0),
    "gather_into_tensor": lambda: dist.gather_into_tensor(ones(1), None, 0),
    "gather_object": lambda: dist.gather_object(1, None, 0),
    "gather_single": lambda: dist.gather_single(ones(1), None, 0),
    "irecv": lambda: dist.irecv(ones(1), 0),
    "isend": lambda: dist.isend(ones(1), 0),
    "monitored_barrier": lambda: dist.monitored_barrier(),
    "recv": lambda: dist.recv(ones(1), 0),
    "recv_object_list": lambda: dist.recv_object_list([1], 0),
    "reduce": lambda: dist.reduce(ones(1), 0),
    "reduce_scatter": lambda: dist.reduce_scatter(ones(1), [ones(1) for _ in range(4)]),
    "reduce_scatter_single": lambda: dist.reduce_scatter_single(ones(1), ones(4)),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(ones(1), ones(4)),
    "scatter": lambda: dist.scatter(ones(1), None, 0),
    "scatter_object_list": lambda: dist.scatter_object_list([1], None, 0),
    "send": lambda: dist.send(ones(1), 0),
    "send_object_list": lambda: dist.send_object_list([1], 0),
}  # fmt: skip

# Functions of distributed_c10d.__all__ that send nothing.
NOT_COMMUNICATION = {
    "destroy_process_group", "get_backend", "get_backend_config", "get_backend_impl", "get_default_backend_for_device",
    "get_debug_level", "get_global_rank", "get_group_rank", "get_node_local_rank", "get_pg_count",
    "get_process_group_ranks", "get_rank", "get_world_size", "init_process_group", "is_backend_available",
    "is_gloo_available", "is_initialized", "is_mpi_available", "is_nccl_available", "is_torchelastic_launched",
    "is_ucc_available", "is_xccl_available", "new_group", "new_subgroups", "new_subgroups_by_enumeration",
    "record_comm", "set_timeout", "shrink_group", "split_group", "supports_complex",
}  # fmt: skip


def functions() -> list[str]:
    c10d = dist.distributed_c10d
    return [n for n in c10d.__all__ if inspect.isroutine(getattr(c10d, n)) and not inspect.isclass(getattr(c10d, n))]


def test_every_function_of_torch_distributed_has_an_example():
    unknown = set(functions()) - NOT_COMMUNICATION - set(EXAMPLES)
    assert not unknown, f"new functions of torch.distributed: {sorted(unknown)}"


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_every_function_is_recorded(world, name):
    if not hasattr(dist, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    run = world()
    EXAMPLES[name]()
    assert run.calls(), f"{name} passed in silence"


def test_shrinking_is_refused(world):
    if not hasattr(dist, "shrink_group"):
        pytest.skip("no shrink_group in this torch")
    world()
    with pytest.raises(NotImplementedError, match="shrink_group"):
        dist.shrink_group([3])


def schemas() -> list:
    found = [s for s in torch._C._jit_get_all_schemas() if s.name.split("::")[0] in NAMESPACES]
    assert len({s.name for s in found}) > 20
    return found


def argument(name: str, kind: str, length: int):
    """A value for an argument of a functional op, by its name."""
    if "Tensor[]" in kind:
        return [device(8), device(4)][:length]
    if "Tensor" in kind:
        return device(8)
    if name in ("reduce_op", "reduceOp"):
        return "sum"
    return {
        "group_size": 4, "group_name": dist.group.WORLD.group_name, "tag": "", "ranks": [0, 1, 2, 3], "src": 0,
        "dst": 2, "output_split_sizes": [2, 2, 2, 2], "input_split_sizes": [2, 2, 2, 2], "op_list": ["isend", "irecv"],
        "peer_list": [0, 2], "tag_list": [0, 0],
    }[name]  # fmt: skip


@pytest.mark.parametrize("schema", schemas(), ids=lambda s: s.name)
def test_every_functional_op_is_recorded(world, schema):
    namespace, name = schema.name.split("::")
    run = world(rank=1, backend="nccl", check_devices=False)
    packet = getattr(getattr(torch.ops, namespace), name)
    operation = getattr(packet, schema.overload_name or "default")
    given = {a.name: argument(a.name, str(a.type), 2) for a in schema.arguments}
    if name in ("isend", "irecv"):
        given["tag"] = 0
    keywords = {"out": device(32 if "gather" in name else 2)} if "out" in given else {}
    answer = run.world.functional(operation, tuple(v for k, v in given.items() if k != "out"), keywords)
    if name in ("wait_tensor", "_wrap_tensor_autograd"):
        assert not run.calls()
        return
    assert run.calls(), f"{schema.name} passed in silence"
    outputs = answer if isinstance(answer, list) else [answer]
    assert all(t.is_meta for t in outputs)
    before = len(run.records())
    run.world.functional(torch.ops._c10d_functional.wait_tensor.default, (outputs[0],))
    assert run.steps()[before:] == [("wait_event", "default")]


def test_every_answer_has_an_op():
    existing = {s.name.split("::")[1] for s in schemas()} | {
        "_wrap_tensor_autograd", "isend", "irecv", "batch_p2p_ops", "reduce_scatter_tensor_out",
    }  # fmt: skip
    assert set(Functional(None).names()) <= existing  # type: ignore[arg-type]
