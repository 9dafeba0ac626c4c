"""What a script hears when it asks a tensor without data: the truth where known, else the policy, counted."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from echo_hooks.devices.pretended import Pretended
from echo_hooks.graph.program import Kind

pytestmark = pytest.mark.usefixtures("stage")


def unknown(*shape, dtype=torch.float32):
    made = torch.empty(shape, device="cuda")
    return made if dtype is torch.float32 else made.to(dtype)


def test_integers_not_yet_written_read_as_zeros(echo):
    header = torch.empty(4, dtype=torch.int64, device="cuda")
    header[0] = 7
    assert header.tolist() == [7, 0, 0, 0]
    assert not echo.recorder.assumptions


def kinds(echo, since: int = 0) -> list[Kind]:
    return [Kind(k) for k in echo.program.kind[since:]]


@pytest.mark.parametrize(
    "dtype, answer",
    [(torch.float32, 1.0), (torch.bfloat16, 1.0), (torch.int64, 1), (torch.uint8, 0), (torch.bool, False)],
)
def test_policy(echo, dtype, answer):
    value = unknown(dtype=dtype).item()
    assert value == answer and type(value) is type(answer)
    (assumption,) = echo.recorder.assumptions.values()
    assert assumption.kind == f"value of an unknown {str(dtype)[6:]} tensor"
    assert assumption.site.startswith("test_answers.py:") and assumption.count == 1


def test_every_answer_is_counted_by_source_line(echo):
    for _ in range(3):
        bool(unknown())
    float(unknown())
    assert sorted(a.count for a in echo.recorder.assumptions.values()) == [1, 3]


def test_asking_costs_a_copy_and_a_synchronisation(echo):
    torch.ones((), device="cuda").item()
    assert kinds(echo) == [Kind.COMPUTE, Kind.COPY, Kind.SYNC]
    assert echo.signatures[-1].attr("direction") == "device_to_host"
    assert echo.signatures[-1].bytes_read == 4


@pytest.mark.parametrize(
    "ask",
    [
        lambda t: t.cpu(),
        lambda t: t.to("cpu"),
        lambda t: t.tolist(),
        lambda t: t.numpy(force=True),
        lambda t: torch.empty(3).copy_(t),
        lambda t: np.asarray(t.cpu()),
    ],
)
def test_every_way_to_the_host(echo, ask):
    tensor = torch.tensor([1.0, 2, 3]).cuda()
    before = len(echo.program)
    assert list(ask(tensor)) == [1, 2, 3]
    assert kinds(echo, before) == [Kind.COPY, Kind.SYNC]
    assert not echo.assumptions


def test_copies_without_blocking_do_not_synchronise(echo):
    device = torch.ones(3).to("cuda", non_blocking=True)
    device.copy_(torch.ones(3), non_blocking=True)
    device.to("cpu", non_blocking=True)
    torch.empty(3).copy_(device, non_blocking=True)
    assert kinds(echo) == [Kind.COPY] * 4


def test_copies_between_tensors_of_the_device_are_kernels(echo):
    one, other = unknown(4), unknown(4)
    one.copy_(other)
    one.to(torch.float16)
    one.to("cuda")
    assert kinds(echo) == [Kind.COMPUTE] * 2


def test_numpy_refuses_as_torch_does(echo):
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        unknown(2).numpy()
    with pytest.raises(TypeError, match="host memory"):
        np.asarray(unknown(2))


def test_an_unknown_tensor_on_the_host_is_real(echo):
    host = unknown(3).cpu()
    assert type(host) is torch.Tensor and host.tolist() == [1.0, 1.0, 1.0]
    assert echo.assumptions == {"contents of an unknown float32 tensor copied to the host": "1.0"}


def test_a_large_host_tensor_answers_with_zeros(echo):
    large = torch.randn(600, 600)
    assert isinstance(large, Pretended) and large.device.type == "cpu"
    assert large.numpy().shape == (600, 600) and not large.numpy().any()
    assert len(large.tolist()) == 600
    assert kinds(echo) == [Kind.HOST]  # what filled it


def test_format_and_repr(echo):
    assert f"{torch.full((), 1.5, device='cuda'):.2f}" == "1.50"
    before = len(echo.program)
    assert "size=(2, 3)" in repr(unknown(2, 3)) and "cuda:0" in str(unknown(2, 3))
    assert f"{unknown(2, 3)}"
    assert len(echo.program) == before and len(echo.recorder.assumptions) == 0


def test_tensors_from_lists_of_pretended_numbers(echo):
    two = torch.full((), 2.0, device="cuda")
    assert torch.tensor([1.0, two]).tolist() == [1, 2]
    assert torch.tensor([[two, 1], [0, two]], device="cuda").tolist() == [[2, 1], [0, 2]]
    assert torch.as_tensor([two]).device.type == "cpu"
    assert torch.as_tensor(two) is two
    assert torch.tensor(two).device.type == "cuda"
    assert two.new_tensor([3, 4]).tolist() == [3, 4] and two.new_tensor([3]).is_cuda
    assert not echo.assumptions


# ---- shapes that depend on values ----


def test_known_masks_select_exactly(echo):
    tensor = torch.arange(12.0, device="cuda").view(3, 4)
    rows = torch.tensor([True, False, True], device="cuda")
    assert tensor[rows].tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert tensor[tensor > 5].tolist() == [6, 7, 8, 9, 10, 11]
    assert tensor[rows, torch.tensor([0, 1], device="cuda")].tolist() == [0, 9]
    assert tensor[:, torch.tensor([False, True, True, False], device="cuda")].shape == (3, 2)
    assert tensor.masked_select(tensor > 5).tolist() == [6, 7, 8, 9, 10, 11]
    assert torch.nonzero(rows).tolist() == [[0], [2]]
    assert rows.nonzero(as_tuple=True)[0].tolist() == [0, 2]
    assert torch.unique(torch.tensor([2, 1, 2], device="cuda")).tolist() == [1, 2]
    assert torch.bincount(torch.tensor([0, 2, 2], device="cuda"), minlength=5).tolist() == [1, 0, 2, 0, 0]
    assert torch.arange(2, device="cuda").repeat_interleave(torch.tensor([1, 2], device="cuda")).tolist() == [0, 1, 1]
    assert not echo.assumptions


def test_a_known_mask_over_unknown_values(echo):
    values, mask = unknown(100, 8), torch.arange(100, device="cuda") < 30
    before = len(echo.program)
    assert values[mask].shape == (30, 8)
    assert values.masked_select(mask[:, None]).shape == (240,)
    assert Kind.SYNC in kinds(echo, before)  # the host must know the size
    assert not echo.assumptions


def test_unknown_masks_give_the_largest_shape_and_say_so(echo):
    values = unknown(100, 8)
    mask = unknown(100) > 0
    assert values[mask].shape == (100, 8)
    assert values[mask, torch.arange(4, device="cuda").repeat(10)[:40] % 8].shape == (40,)  # the other index tells
    assert mask.nonzero().shape == (100, 1)
    assert values.masked_select(values > 0).shape == (800,)
    assert torch.bincount(unknown(100, dtype=torch.int64), minlength=8).shape == (8,)
    assert {kind for kind in echo.assumptions} >= {f"size of the result of aten.{n}" for n in (
        "index.Tensor", "nonzero.default", "masked_select.default", "bincount.default")}  # fmt: skip


def test_routing_of_unknown_scores_is_balanced(echo):
    indices = unknown(64, 8).topk(2, dim=-1).indices
    assert torch.bincount(indices.flatten(), minlength=8).tolist() == [16] * 8
    assert (indices[:, 0] != indices[:, 1]).all().item()
    assert echo.assumptions == {"top 2 of 8 unknown scores": "all chosen equally often"}
    known = torch.tensor([[0.1, 0.9, 0.5]], device="cuda").topk(2)
    assert known.indices.tolist() == [[1, 2]]


# ---- checks for overflow ----


def test_unknown_values_are_finite(echo):
    small, large = unknown(3), unknown(1000, 1000)
    for tensor in (small, large, large.norm()):
        assert not torch.isnan(tensor).any()
        assert not torch.isinf(tensor).any()
    assert torch.isfinite(small).all() and torch.isfinite(large.sum())
    assert echo.assumptions["infinity or NaN in an unknown tensor"] == "none"
    known = torch.tensor([1.0, float("nan")], device="cuda")
    assert torch.isnan(known).any() and not torch.isfinite(known).all()


def test_a_gradient_scaler_takes_its_step(echo):
    model = nn.Linear(3, 3).cuda()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler()
    scaler.scale(model(unknown(2, 3)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert echo.capture.steps.optimizer_calls == 1
    assert scaler.get_scale() == 65536


# ---- copies as Python objects ----


def test_pickle_and_deepcopy(echo):
    tensor = torch.empty(3, 4, device="cuda").t().requires_grad_()
    for copied in (pickle.loads(pickle.dumps(tensor)), copy.deepcopy(tensor)):
        assert isinstance(copied, Pretended) and copied.echo_storage is not tensor.echo_storage
        assert (copied.shape, copied.stride(), copied.device) == ((4, 3), (1, 4), torch.device("cuda:0"))
        assert copied.requires_grad
    known = copy.deepcopy(torch.ones(2, device="cuda"))
    assert known.tolist() == [1, 1]


def test_deepcopy_keeps_shared_tensors_shared_and_their_attributes(echo):
    model = nn.Linear(2, 2).cuda()
    model.weight.tensor_model_parallel = True
    model.again = model.weight
    other = copy.deepcopy(model)
    assert other.again is other.weight and other.weight is not model.weight
    assert isinstance(other.weight, nn.Parameter) and other.weight.tensor_model_parallel


@pytest.mark.parametrize("weights_only", [True, False])
def test_checkpoints_come_back(echo, weights_only):
    model = nn.Linear(3, 2).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(unknown(1, 3)).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=weights_only)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    assert loaded["model"]["weight"].device == torch.device("cuda:0") and loaded["step"] == 3
    file.seek(0)
    on_host = torch.load(file, map_location="cpu", weights_only=weights_only)
    assert on_host["model"]["weight"].device.type == "cpu"


def test_a_pickled_module_keeps_its_parameters(echo):
    file = io.BytesIO()
    torch.save(nn.Linear(3, 2).cuda(), file)
    file.seek(0)
    model = torch.load(file, weights_only=False)
    assert [type(p) for p in model.parameters()] == [Pretended] * 2
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in model.parameters())
