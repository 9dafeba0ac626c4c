"""Ops without a meta kernel: rules against what torch documents, the CPU kernel against known results."""

from __future__ import annotations

import pytest
import torch

from echo_hooks.capture.plans import Planner

aten = torch.ops.aten


def outputs(func, *args, **kwargs):
    """(shape, dtype) of each output, as the planner sees them for tensors on a device."""
    planner = Planner()

    def on_device(value):
        return fake(planner, value) if isinstance(value, torch.Tensor) else value

    args = tuple([on_device(v) for v in a] if isinstance(a, list) else on_device(a) for a in args)
    result = planner._run(func, args, kwargs)
    flat = result if isinstance(result, tuple) else (result,)
    assert all(t is None or t.device == torch.device("cuda", 0) for t in flat)
    return [None if t is None else (tuple(t.shape), t.dtype) for t in flat], args


def fake(planner, value):
    fake = planner.fake_like(value)
    fake.fake_device = torch.device("cuda", 0)
    return fake


@pytest.fixture(autouse=True)
def no_device_is_initialised(monkeypatch):
    import torch._subclasses.fake_tensor as fake_tensor

    monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda _device: None)


def test_synchronised_batch_norm():
    half, single = torch.float16, torch.float32
    x, stat = torch.empty(2, 3, 4, 4, dtype=half), torch.empty(3)
    assert outputs(aten.batch_norm_stats.default, x, 1e-5)[0] == [((3,), single)] * 2
    counts = torch.empty(8)
    gathered = (x, torch.empty(8, 3), torch.empty(8, 3), stat, stat, 0.1, 1e-5, counts)
    assert outputs(aten.batch_norm_gather_stats_with_counts.default, *gathered)[0] == [((3,), single)] * 2
    assert outputs(aten.batch_norm_elemt.default, x, stat, stat, stat, stat, 1e-5)[0] == [((2, 3, 4, 4), half)]
    reduced, _ = outputs(aten.batch_norm_backward_reduce.default, x, x, stat, stat, stat, True, True, False)
    assert reduced == [((3,), single)] * 3 + [None]
    backward = (x, x, stat, stat, stat, stat, stat, torch.empty(8, dtype=torch.int32))
    assert outputs(aten.batch_norm_backward_elemt.default, *backward)[0] == [((2, 3, 4, 4), half)]


def test_gru_cell():
    gates, hidden = torch.empty(4, 21), torch.empty(4, 7)
    cell = outputs(aten._thnn_fused_gru_cell.default, gates, gates, hidden, None, None)[0]
    assert cell == [((4, 7), torch.float32), ((4, 35), torch.float32)]


def test_the_cpu_kernel_answers_for_the_rest():
    assert outputs(aten._logcumsumexp.default, torch.empty(3, 4), 1)[0] == [((3, 4), torch.float32)]
    assert outputs(aten._aminmax.default, torch.empty(3, 4))[0] == [((), torch.float32)] * 2


def test_in_place_ops_give_back_their_arguments():
    options = dict(weight_decay=0.0, momentum=0.9, lr=0.1, dampening=0.0, nesterov=False, maximize=False)
    lists = [[torch.empty(4)] for _ in range(3)]
    planner = Planner()
    fakes = [[fake(planner, t) for t in tensors] for tensors in lists]
    assert planner._run(aten._fused_sgd_.default, fakes, {**options, "is_first_step": False}) is None


def test_a_large_argument_is_refused():
    with pytest.raises(NotImplementedError, match="_logcumsumexp"):
        outputs(aten._logcumsumexp.default, torch.empty(1, device="meta").expand(1 << 25), 0)
