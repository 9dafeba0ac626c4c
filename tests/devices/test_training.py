"""Pieces of training scripts on the pretended device: they run, on the right device, with the right ops."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def block(device="cuda", dtype=torch.float32):
    return nn.Sequential(
        nn.Linear(8, 16, device=device, dtype=dtype), nn.GELU(), nn.LayerNorm(16, device=device, dtype=dtype)
    )


def test_backward_reaches_every_parameter(mode):
    model = block()
    loss = model(torch.randn(4, 8, device="cuda")).sum()
    loss.backward()
    assert {p.grad.device for p in model.parameters()} == {torch.device("cuda", 0)}
    assert "native_layer_norm_backward" in mode.ops
    assert loss.item() == 1.0


@pytest.mark.parametrize(
    "options, op",
    [({"foreach": False}, "addcdiv_"), ({"foreach": True}, "_foreach_addcdiv_"), ({"fused": True}, "_fused_adamw_")],
)
def test_adamw(mode, options, op):
    model = block()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    assert op in mode.ops


def test_gradient_clipping(mode):
    model = block()
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm.device == torch.device("cuda", 0)


def test_autocast_casts_matmul_to_bfloat16(mode):
    model = block()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model[0](torch.randn(4, 8, device="cuda"))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert model[0].weight.grad.dtype == torch.float32


def test_grad_scaler(mode):
    model = block()
    scaler = torch.amp.GradScaler("cuda")
    assert scaler.is_enabled()
    scaler.scale(model(torch.randn(4, 8, device="cuda")).sum()).backward()
    assert "mul" in mode.ops


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_computes_again_in_backward(mode, use_reentrant):
    model = block()
    inputs = torch.randn(4, 8, device="cuda", requires_grad=True)
    out = checkpoint(model, inputs, use_reentrant=use_reentrant)
    before = mode.ops.count("addmm")
    out.sum().backward()
    assert before == 1
    assert mode.ops.count("addmm") == 2
    assert inputs.grad.device == inputs.device


def test_convolution_embedding_cross_entropy(mode):
    inputs = torch.randn(2, 3, 8, 8, device="cuda", requires_grad=True)
    nn.Conv2d(3, 4, 3, device="cuda")(inputs).mean().backward()
    assert inputs.grad.shape == inputs.shape
    table = nn.Embedding(10, 4, device="cuda")
    logits = table(torch.zeros(6, dtype=torch.int64, device="cuda"))
    nn.functional.cross_entropy(logits, torch.zeros(6, dtype=torch.int64, device="cuda")).backward()
    assert table.weight.grad.shape == (10, 4)


def test_devices_in_every_spelling(mode):
    torch.cuda.set_device(3)
    here = torch.device("cuda", 3)
    assert torch.empty(2, device="cuda").device == here
    assert torch.empty(2).cuda().device == here
    assert torch.empty(2).to("cuda").device == here
    assert torch.empty(2, device=0).device == torch.device("cuda", 0)
    assert torch.empty(2, device=torch.cuda.current_device()).device == here
    assert torch.empty(2).cuda(5).device == torch.device("cuda", 5)
    with torch.device("cuda"):
        assert torch.zeros(2).device == here
    with torch.cuda.device(1):
        assert torch.empty(2, device="cuda").device == torch.device("cuda", 1)
    assert torch.cuda.current_device() == 3


def test_backward_on_another_device(mode):
    torch.cuda.set_device(3)
    model = block(device="cuda")
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    assert {p.grad.device for p in model.parameters()} == {torch.device("cuda", 3)}


def test_mixing_devices_is_still_an_error(mode):
    with pytest.raises(RuntimeError, match=r"same device|two different devices"):
        torch.randn(2, device="cuda") + torch.randn(2)


def test_generator_is_accepted_by_factories(mode):
    generator = torch.Generator("cuda").manual_seed(5)
    assert torch.randn(3, device="cuda", generator=generator).is_cuda


def test_typed_tensor_classes(mode):
    tensor = torch.zeros(3, device="cuda")
    assert isinstance(tensor, torch.cuda.FloatTensor)
    assert not isinstance(tensor, torch.cuda.HalfTensor)
    assert not isinstance(torch.zeros(3), torch.cuda.FloatTensor)
    assert not isinstance(3, torch.cuda.FloatTensor)
    assert tensor.type() == "torch.cuda.FloatTensor"
    assert tensor.half().type() == "torch.cuda.HalfTensor"
    assert tensor.type(torch.cuda.HalfTensor).dtype == torch.float16
    assert torch.cuda.LongTensor(2, 3).shape == (2, 3)


def test_compile_is_the_identity_and_says_so_once(cuda, recorder):
    def function(x):
        return x

    assert torch.compile(function) is function
    assert torch.compile(mode="max-autotune", fullgraph=True)(function) is function
    assert sum("torch.compile" in note for note in recorder.notes) == 1


def test_default_tensor_type_of_older_scripts(mode):
    torch.set_default_tensor_type(torch.cuda.HalfTensor)
    try:
        tensor = torch.zeros(2)
        assert tensor.is_cuda and tensor.dtype == torch.float16
    finally:
        torch.set_default_tensor_type(torch.FloatTensor)
    assert torch.zeros(2).type() == "torch.FloatTensor"


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_run_cell_by_cell(mode, recorder, kind):
    layer = kind(8, 8, device="cuda")
    layer(torch.randn(3, 2, 8, device="cuda"))[0].sum().backward()
    assert layer.weight_ih_l0.grad.is_cuda
    assert any("cell by cell" in note for note in recorder.notes)
    assert torch.backends.cudnn.enabled


def test_batch_norm_is_cudnns_and_convolution_keeps_channels_last(mode):
    images = torch.randn(2, 4, 8, 8, device="cuda").to(memory_format=torch.channels_last)
    out = nn.Conv2d(4, 4, 3, device="cuda").to(memory_format=torch.channels_last)(images)
    assert out.is_contiguous(memory_format=torch.channels_last)
    nn.BatchNorm2d(4, device="cuda")(out).sum().backward()
    assert "cudnn_batch_norm" in mode.ops and "convolution_backward" in mode.ops
