"""torch.cuda's names: presence, properties, streams, events, random state, memory."""

from __future__ import annotations

import pytest
import torch

from echo_hooks.devices.libraries import torch_release
from echo_hooks.devices.pretended_cuda import device_patches
from echo_hooks.graph.program import Kind


def records(recorder):
    """(kind, stream, event) of every record."""
    program = recorder.program.program()
    return [
        (Kind(kind).name, int(stream), int(event))
        for kind, stream, event in zip(program.kind, program.stream, program.event, strict=True)
    ]


def test_presence(cuda):
    assert torch.cuda.is_available() and torch.cuda.is_initialized() and torch.backends.cuda.is_built()
    assert torch.cuda.device_count() == torch.accelerator.device_count() == 8
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.version.cuda
    torch.cuda.init()


def test_properties(cuda):
    properties = torch.cuda.get_device_properties(2)
    assert (properties.name, properties.major, properties.minor) == ("NVIDIA H100 80GB HBM3", 9, 0)
    assert properties.total_memory == 80 * 2**30
    assert properties.multi_processor_count == 132
    assert properties.shared_memory_per_block_optin == 227 * 1024
    assert torch.cuda.get_device_name() == "NVIDIA H100 80GB HBM3"
    assert torch.cuda.get_device_capability("cuda:1") == (9, 0)
    assert torch.cuda.is_bf16_supported() and torch.cuda.is_tf32_supported()
    assert torch.cuda.get_arch_list() == ["sm_90"]
    assert torch.cuda.can_device_access_peer(0, 1)
    with pytest.raises(AssertionError, match="Invalid device id"):
        torch.cuda.get_device_properties(8)


def test_devices_that_do_not_exist(cuda):
    with pytest.raises(RuntimeError, match="8 devices"):
        torch.cuda.set_device(8)


def test_accelerator_names_are_the_same_device(cuda):
    torch.accelerator.set_device_index(2)
    assert torch.cuda.current_device() == torch.accelerator.current_device_index() == cuda.current_device == 2
    if hasattr(torch.accelerator, "get_device_capability"):
        assert torch.bfloat16 in torch.accelerator.get_device_capability()["supported_dtypes"]
    stream = torch.Stream(device="cuda")
    torch.accelerator.set_stream(stream)
    assert torch.cuda.current_stream() == torch.accelerator.current_stream() == stream


def test_stream_context_moves_the_recorder(cuda, recorder):
    side = torch.cuda.Stream()
    assert recorder.stream == 0
    with torch.cuda.stream(side):
        assert recorder.stream == side.echo_number == 1
        assert torch.cuda.current_stream() == side
        with torch.cuda.stream(None):
            assert recorder.stream == 1
    assert recorder.stream == 0
    with side:
        assert recorder.stream == 1
    assert recorder.stream == 0
    assert recorder.program.streams == ["default", "stream 1"]


def test_stream_of_another_device_selects_it(cuda):
    far = torch.cuda.Stream(device=5)
    with torch.cuda.stream(far):
        assert torch.cuda.current_device() == 5
    assert torch.cuda.current_device() == 0
    assert torch.cuda.current_stream(5) == torch.cuda.default_stream(5)


def test_waits_are_recorded_in_order(cuda, recorder):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    event = torch.cuda.Event()
    with torch.cuda.stream(side):
        event.record()
    event.wait()
    torch.cuda.current_stream().wait_event(event)
    side.record_event().synchronize()
    side.synchronize()
    torch.cuda.synchronize()
    number = side.echo_number
    assert records(recorder) == [
        ("RECORD_EVENT", 0, 0),
        ("WAIT_EVENT", number, 0),
        ("RECORD_EVENT", number, 1),
        ("WAIT_EVENT", 0, 1),
        ("WAIT_EVENT", 0, 1),
        ("RECORD_EVENT", number, 2),
        ("SYNC", -1, 2),
        ("SYNC", number, -1),
        ("SYNC", -1, -1),
    ]


def test_events_never_recorded_are_no_wait(cuda, recorder):
    event = torch.cuda.Event()
    event.wait()
    event.synchronize()
    assert event.query()
    assert records(recorder) == []


def test_generic_event_and_stream(cuda, recorder):
    event = torch.Event("cuda", enable_timing=True)
    assert isinstance(event, torch.Event) and isinstance(event, torch.cuda.Event)
    event.record(torch.Stream("cuda:0"))
    assert records(recorder) == [("RECORD_EVENT", 1, 0)]
    assert isinstance(torch.cuda.Stream(), torch.Stream)


def test_elapsed_time_is_an_assumption(cuda, recorder):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with pytest.raises(ValueError, match="recorded"):
        start.elapsed_time(end)
    start.record(), end.record()
    assert start.elapsed_time(end) > 0
    assert [(a.kind, a.count) for a in recorder.assumptions.values()] == [("elapsed_time between events", 1)]
    with pytest.raises(ValueError, match="enable_timing"):
        torch.cuda.Event().elapsed_time(end)


def test_streams_come_from_a_pool_of_32(cuda):
    streams = [torch.cuda.Stream() for _ in range(33)]
    assert streams[32] == streams[0]
    assert len(set(streams)) == 32
    assert torch.cuda.Stream(priority=-1) not in streams
    assert torch.cuda.Stream(priority=-1).priority == -1
    assert torch.cuda.Stream(priority=5).priority == 0


def test_external_stream(cuda, recorder):
    stream = torch.cuda.ExternalStream(0xABC0)
    assert stream.cuda_stream == 0xABC0
    with torch.cuda.stream(stream):
        assert recorder.program.streams[recorder.stream].startswith("stream ")
    assert torch.cuda.get_stream_from_external(0xABC0) == stream


def test_random_state_has_the_cuda_form(cuda):
    torch.manual_seed(1234)
    state = torch.cuda.get_rng_state()
    assert state.dtype == torch.uint8 and state.tolist()[:3] == [0xD2, 0x04, 0] and len(state) == 16
    assert torch.cuda.initial_seed() == 1234
    torch.cuda.manual_seed(7)
    assert torch.cuda.initial_seed() == 7
    torch.cuda.set_rng_state(state)
    assert torch.cuda.initial_seed() == 1234
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert len(torch.cuda.get_rng_state_all()) == 8
    torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all())
    torch.cuda._set_rng_state_offset(8)
    assert torch.cuda._get_rng_state_offset() == 8
    with pytest.raises(RuntimeError, match="multiple of 4"):
        torch.cuda._set_rng_state_offset(2)
    with pytest.raises(RuntimeError, match="wrong size"):
        torch.cuda.set_rng_state(torch.get_rng_state())


def test_fork_rng_restores(cuda):
    torch.cuda.manual_seed(5)
    with torch.random.fork_rng(devices=[0]):
        torch.cuda.manual_seed(6)
    assert torch.cuda.initial_seed() == 5


def test_generators(cuda):
    torch.cuda.set_device(2)
    generator = torch.Generator(device="cuda")
    assert generator.device == torch.device("cuda", 2)
    generator.manual_seed(99)
    other = torch.Generator("cuda:1")
    other.set_state(generator.get_state())
    assert other.initial_seed() == 99
    assert isinstance(generator, torch.Generator)
    assert torch.Generator().device == torch.device("cpu")
    assert isinstance(torch.default_generator, torch.Generator)
    assert generator.clone_state().initial_seed() == 99


def test_memory_is_answered_by_the_allocator(cuda):
    allocator = cuda._state.allocator
    torch.cuda.set_device(3)
    block = allocator.allocate(3 * 2**20)
    assert torch.cuda.memory_allocated() == torch.accelerator.memory_allocated() == 3 * 2**20
    assert torch.cuda.memory_reserved() == 20 * 2**20
    assert torch.cuda.mem_get_info() == (80 * 2**30 - 20 * 2**20, 80 * 2**30)
    allocator.free(block)
    assert torch.cuda.max_memory_allocated() == 3 * 2**20
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    assert torch.cuda.memory_stats()["num_alloc_retries"] == 0
    assert "CUDA memory summary" in torch.cuda.memory_summary()
    assert torch.cuda.memory_allocated(1) == 0


def test_small_things(cuda, recorder):
    torch.cuda.nvtx.range_push("a")
    assert torch.cuda.nvtx.range_pop() == 0
    with torch.cuda.nvtx.range("b"):
        torch.cuda.nvtx.mark("c")
    torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
    torch.cuda.profiler.stop()
    torch.cuda.ipc_collect()
    assert torch.cuda.nccl.version() == (2, 28, 9)
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.utilization() == 0
    assert [a.kind for a in recorder.assumptions.values()] == ["torch.cuda.utilization"]


def test_graphs_are_refused_where_they_are_used(cuda):
    graph = torch.cuda.CUDAGraph()
    graph.reset()
    with pytest.raises(NotImplementedError, match="CUDA graphs are not simulated"), torch.cuda.graph(graph):
        pass
    with pytest.raises(NotImplementedError):
        torch.cuda.make_graphed_callables(torch.nn.Linear(2, 2), ())
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        pass


def test_retarget_serves_another_rank(cuda, recorder):
    from echo_hooks.devices.allocator import CachingAllocator
    from echo_hooks.graph.recorder import Recorder

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        other = Recorder(rank=5, world_size=8)
        cuda.retarget(other, 5, CachingAllocator(2**30))
        assert other.stream == side.echo_number == 1
        torch.cuda.Event().record()
    torch.compile(records)
    third = Recorder(rank=6, world_size=8)
    cuda.retarget(third, 6, CachingAllocator(2**30))
    assert [note for note in third.notes if "torch.compile" in note]
    assert records(recorder) == []
    assert records(other) == [("RECORD_EVENT", 1, 0)]
    assert other.program.streams == ["default", "stream 1"]


# Names that Echo creates where a supported build lacks them, and a torch that has them (2.9 does not).
SINCE = {
    "_accelerator_emptyHostCache": (2, 10),
    "_accelerator_getMemoryInfo": (2, 10),
    "_cuda_getCurrentSolverHandle": (2, 10),
}
MADE_BY_INITIALISATION = {"_get_device_properties"}


def test_every_patched_name_exists():
    """Fails when torch renames what is replaced. The CPU wheel lacks most of the functions of torch._C."""
    for patch in device_patches(1):
        assert patch.why
        if patch.name in MADE_BY_INITIALISATION or SINCE.get(patch.name, (2, 9)) > torch_release():
            continue
        if patch.create and not torch.backends.cuda.is_built():
            continue
        assert hasattr(patch.owner, patch.name), f"{patch.owner.__name__}.{patch.name}"
