"""What scripts do to get a model onto the device, and what they do beside their training loop."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from echo_hooks.devices.pretended import Pretended
from echo_hooks.graph.program import Kind

pytestmark = pytest.mark.usefixtures("stage")
HERE = torch.device("cuda", 0)


def tied():
    model = nn.Sequential(nn.Embedding(50, 8), nn.LayerNorm(8), nn.Linear(8, 50, bias=False))
    model[2].weight = model[0].weight
    model.register_buffer("scale", torch.ones(3))
    model[0].weight.shared = True
    return model


MOVES = {
    "cuda": (lambda m: m.cuda(), HERE, torch.float32),
    "to": (lambda m: m.to("cuda"), HERE, torch.float32),
    "to dtype": (lambda m: m.to("cuda", torch.bfloat16), HERE, torch.bfloat16),
    "half then cuda": (lambda m: m.half().cuda(), HERE, torch.float16),
    "cuda then bfloat16": (lambda m: m.cuda().bfloat16(), HERE, torch.bfloat16),
    "to_empty": (lambda m: m.to_empty(device="cuda"), HERE, torch.float32),
    "meta then to_empty": (lambda m: m.to("meta").to_empty(device="cuda"), HERE, torch.float32),
    "there and back": (lambda m: m.cuda().cpu().cuda(1), torch.device("cuda", 1), torch.float32),
}


@pytest.mark.parametrize("name", MOVES)
def test_moves_keep_identity_ties_attributes_and_optimizers(echo, name):
    move, device, dtype = MOVES[name]
    model = tied()
    before = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)  # built before the move
    moved = move(model)
    after = list(moved.parameters())
    assert moved is model and all(a is b for a, b in zip(after, before, strict=True))
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    assert {(p.device, p.dtype) for p in after} == {(device, dtype)}
    assert all(type(p) is Pretended and isinstance(p, nn.Parameter) and p.is_leaf and p.requires_grad for p in after)
    assert model[2].weight is model[0].weight and model[0].weight.shared
    assert model.scale.device == device
    model(torch.zeros(4, dtype=torch.int64, device=device)).sum().backward()
    assert all(p.grad.device == device and p.grad.dtype == dtype for p in after)
    optimizer.step()


def test_back_on_the_host_parameters_are_real(echo):
    model = nn.Linear(3, 3).cuda().cpu()
    assert type(model.weight) is nn.Parameter and model.weight.device.type == "cpu"
    assert model(torch.ones(1, 3)).shape == (1, 3)


def test_gradients_move_along(echo):
    model = nn.Linear(3, 3)
    model(torch.ones(1, 3)).sum().backward()
    model.cuda()
    assert model.weight.grad.device == HERE and model.bias.grad.tolist() == [1, 1, 1]


def test_small_parameters_keep_their_values(echo):
    model = nn.LayerNorm(4)
    with torch.no_grad():
        model.bias.copy_(torch.tensor([1.0, 2, 3, 4]))
    assert model.cuda().bias.tolist() == [1, 2, 3, 4]
    assert model.half().bias.tolist() == [1, 2, 3, 4]


def test_a_model_built_on_meta(echo):
    with torch.device("meta"):
        model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    assert echo.capture.memory.allocator.allocated_bytes == 0 and len(echo.program) == 0
    model.to_empty(device="cuda")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert {p.device for p in model.parameters()} == {HERE}
    assert model(torch.empty(2, 4, 16, device="cuda")).shape == (2, 4, 16)


def test_a_large_model_on_the_host_costs_no_memory(echo):
    model = nn.Linear(20_000, 20_000, bias=False)  # 1.6 GB
    assert type(model.weight) is Pretended and model.weight.device.type == "cpu"
    assert echo.program.kind.tolist() == [Kind.HOST]  # what initialised it
    model.cuda()
    assert echo.program.kind.tolist() == [Kind.HOST, Kind.COPY, Kind.SYNC]
    assert echo.signatures[0].bytes_read == 1_600_000_000


def test_default_devices(echo):
    with torch.device("cuda"):
        made = [torch.zeros(2), torch.tensor([1, 2]), torch.arange(3), nn.Linear(2, 2).weight, torch.as_tensor([1.0])]
    assert {t.device for t in made} == {HERE}
    torch.set_default_device("cuda")
    try:
        assert torch.tensor([1]).device == torch.ones(1).device == HERE
        assert torch.tensor([1], device="cpu").device.type == "cpu"
    finally:
        torch.set_default_device(None)
    assert torch.tensor([1]).device.type == "cpu"


def test_data_takes_the_others_storage(echo):
    """Flat buffers: parameters become views of one allocation (DDP buckets, Megatron, DeepSpeed)."""
    model = nn.Linear(8, 8, bias=False).cuda()
    flat = torch.zeros(64, device="cuda")
    before = len(echo.program)
    model.weight.data = flat.view(8, 8)
    model.weight.grad = torch.empty(8, 8, device="cuda")
    model.weight.grad.data = flat.view(8, 8)
    assert len(echo.program) == before
    assert model.weight.echo_storage is flat.echo_storage and isinstance(model.weight, nn.Parameter)
    assert model.weight.data_ptr() == flat.data_ptr()
    model.weight.data = model.weight.data.half()
    assert model.weight.dtype == torch.float16 and model.weight.requires_grad


def test_what_torch_would_refuse_is_refused(echo, capfd):
    with pytest.raises(RuntimeError, match=r"same device|two different devices"):
        torch.ones(2, device="cuda") + torch.ones(2)
    with pytest.raises(RuntimeError, match=r"reduction dim|shape"):
        torch.ones(2, 3, device="cuda") @ torch.ones(2, 3, device="cuda")
    assert capfd.readouterr().err == ""
    with pytest.raises(RuntimeError, match=r"size|broadcast"):
        torch.ones(2, device="cuda") + torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="leaf"):
        torch.ones(2, device="cuda", requires_grad=True).add_(1)


def test_a_tensor_outlives_the_simulation_with_a_clear_error(watch):
    echo = watch()
    tensor = torch.ones(2, device="cuda")
    echo.capture.stop()
    try:
        with pytest.raises(RuntimeError, match="a pretended tensor was used outside a simulation"):
            tensor + 1
    finally:
        echo.capture.start()


# ---- other threads ----


def test_a_thread_that_prefetches(echo):
    batches: queue.Queue = queue.Queue()

    def prefetch():
        for _ in range(3):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                batches.put(torch.randn(4, 8).cuda(non_blocking=True))

    thread = threading.Thread(target=prefetch)
    thread.start()
    model = nn.Linear(8, 8).cuda()
    for _ in range(3):
        model(batches.get()).sum().backward()
    thread.join()
    program = echo.program
    assert sorted(set(program.thread.tolist())) == [0, 1]
    assert (program.kind[program.thread == 1] == Kind.COPY).all() and (program.thread == 1).sum() == 3


def test_a_pool_of_threads_computes_forward_and_backward(echo):
    model = nn.Linear(8, 8).cuda()

    def work(_):
        model(torch.randn(2, 8, device="cuda")).sum().backward()
        return torch.ones(3, device="cuda").sum().item()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(4))) == [3.0] * 4
    assert model.weight.grad.device == HERE


def test_a_loader_with_pinned_memory(echo):
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    loader = torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True)
    assert [batch[0].cuda(non_blocking=True).sum().item() for batch in loader] == [6.0, 22.0]
    assert not echo.assumptions
