"""Layers of the Transformer Engine stand-in alone: names of parameters, kernels, saved memory, dtypes of products."""

from __future__ import annotations

import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from echo_hooks.graph.program import Kind
from echo_hooks.stages import Job, Stage
from echo_hooks.timing.classes import op_class
from echo_hooks.timing.roofline import estimate


@pytest.fixture(scope="module")
def stage():
    stage = Stage(Job(1, 1, "h100-sxm:1x1"))
    stage.install()
    stage.stand_ins.asked = frozenset({"transformer_engine", "apex", "amp_C"})
    yield stage
    stage.remove()


@pytest.fixture
def te(stage):
    import transformer_engine.pytorch as te

    return te


@pytest.fixture
def watch(stage):
    @contextmanager
    def watching():
        capture = stage.become(0)
        capture.start()
        try:
            yield capture
        finally:
            capture.stop()

    return watching


def kernels(capture) -> list:
    """OpSignature of every kernel so far, in order."""
    program = capture.recorder.program.program()
    return [capture.recorder.ops.signatures[op] for op in program.op[np.isin(program.kind, (Kind.COMPUTE,))]]


def test_the_surface_that_megatron_imports(te):
    import amp_C
    import apex.normalization
    import transformer_engine

    assert transformer_engine.__version__ and transformer_engine.common.recipe.DelayedScaling
    assert te.module.base.initialize_ub and te.optimizers.FusedAdam and te.distributed.CudaRNGStatesTracker
    assert apex.normalization.FusedLayerNorm and amp_C.multi_tensor_l2norm


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda te: te.Linear(16, 32, device="cuda"), {"weight": (32, 16), "bias": (32,)}),
        (
            lambda te: te.LayerNormLinear(16, 32, device="cuda"),
            {"layer_norm_weight": (16,), "layer_norm_bias": (16,), "weight": (32, 16), "bias": (32,)},
        ),
        (
            lambda te: te.LayerNormMLP(16, 64, activation="swiglu", normalization="RMSNorm", bias=False),
            {"layer_norm_weight": (16,), "fc1_weight": (128, 16), "fc2_weight": (16, 64)},
        ),
        (
            lambda te: te.GroupedLinear(2, 16, 32, bias=False),
            {"weight0": (32, 16), "weight1": (32, 16)},
        ),
        (lambda te: te.RMSNorm(16), {"weight": (16,)}),
    ],
)
def test_parameters_have_transformer_engines_names(te, watch, make, names):
    with watch():
        module = make(te)
        assert {name: tuple(p.shape) for name, p in module.named_parameters()} == names


def test_a_linear_layer_is_three_products(te, watch):
    with watch() as capture:
        layer = te.Linear(64, 128, bias=True, params_dtype=torch.bfloat16)
        x = torch.empty(32, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        before = len(kernels(capture))
        layer(x).sum().backward()
        products = [k for k in kernels(capture)[before:] if k.flops]
    assert [k.name for k in products] == ["aten.addmm.default", "aten.mm.default", "aten.mm.default"]
    assert [k.flops for k in products] == [2 * 32 * 64 * 128] * 3
    assert x.grad.shape == (32, 64) and layer.weight.grad.shape == (128, 64) and layer.bias.grad.shape == (128,)


def test_eight_bit_products_have_eight_bit_operands(te, watch):
    from transformer_engine.common.recipe import DelayedScaling

    with watch() as capture:
        layer = te.Linear(64, 128, bias=False, params_dtype=torch.bfloat16)
        x = torch.empty(32, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        before = len(kernels(capture))
        with te.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling()):
            y = layer(x)
        y.sum().backward()
        products = [k for k in kernels(capture)[before:] if k.flops]
    assert [k.name for k in products] == ["aten._scaled_mm.default"] * 3
    assert [{t.dtype for t in k.inputs[:2]} for k in products] == [
        {"float8_e4m3fn"},
        {"float8_e5m2", "float8_e4m3fn"},
        {"float8_e5m2", "float8_e4m3fn"},
    ]
    assert [k.flops for k in products] == [2 * 32 * 64 * 128] * 3


def test_eight_bit_products_are_timed_at_the_eight_bit_peak(te, watch, stage):
    def product_us(eight_bits: bool) -> float:
        with watch() as capture:
            layer = te.Linear(8192, 8192, bias=False, params_dtype=torch.bfloat16)
            x = torch.empty(8192, 8192, dtype=torch.bfloat16, device="cuda")
            with te.fp8_autocast(enabled=eight_bits), torch.no_grad():
                layer(x)
            (product,) = (k for k in kernels(capture) if k.flops)
        return estimate(product, stage.accelerator).duration_us

    peaks = stage.accelerator.peak_flops
    fixed_us = 10  # launch and ramp, of some 1300 microseconds
    assert product_us(False) / product_us(True) == pytest.approx(
        peaks["float8"] / peaks["bfloat16"], abs=fixed_us / 600
    )


def test_the_gradient_of_a_weight_is_added_by_its_product(te, watch):
    with watch() as capture:
        layer = te.Linear(64, 128, bias=False, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
        layer.weight.main_grad = torch.zeros(128, 64, device="cuda")
        x = torch.empty(32, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        layer(x).sum().backward()
        last = [k for k in kernels(capture) if k.flops][-1]
    assert last.name == "fused.addmm_.default" and last.flops == 2 * 32 * 64 * 128
    assert [t.dtype for t in last.inputs] == ["float32", "bfloat16", "bfloat16"]
    assert layer.weight.grad is None


def test_attention_keeps_output_and_sums_alone(te, watch):
    """No score matrix: what stays after forward is q, k, v, the output and one float32 a query and head."""
    seq, batch, heads, size = 128, 2, 4, 16
    with watch() as capture:
        attention = te.DotProductAttention(heads, size, num_gqa_groups=2, attn_mask_type="causal")
        q = torch.empty(seq, batch, heads, size, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        k, v = (torch.empty(seq, batch, 2, size, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in "kv")
        held = torch.cuda.memory_allocated()
        out = attention(q, k, v)
        assert torch.cuda.memory_allocated() - held == q.numel() * 2 + seq * batch * heads * 4
        out.sum().backward()
        first, last = (k for k in kernels(capture) if "attention" in k.name)
    product = 2 * seq * seq * size * batch * heads
    assert (first.flops, last.flops) == (2 * product, 5 * product)
    assert first.attr("causal") and last.attr("causal")
    assert out.shape == (seq, batch, heads * size) and k.grad.shape == k.shape


def test_every_kernel_has_a_class(te):
    from echo_megatron.te import kernels as module

    defined = [name for name, value in vars(module).items() if isinstance(value, torch._ops.OpOverload)]
    assert len(defined) > 10
    for name in defined:
        overload = vars(module)[name]
        assert op_class(str(overload)) is not None or name == "addmm_", name


def test_what_is_not_simulated_is_refused(te, watch):
    with watch(), pytest.raises(NotImplementedError, match="fp8-param-gather"), te.fp8_model_init(enabled=True):
        pass


def test_optimizer_updates_moments_in_one_kernel(te, watch):
    with watch() as capture:
        parameters = [torch.nn.Parameter(torch.zeros(64, device="cuda")) for _ in range(3)]
        optimizer = te.optimizers.FusedAdam(parameters, lr=1e-3)
        for p in parameters:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        last = kernels(capture)[-1]
    assert last.name == "aten._fused_adamw_.default" and last.attr("tensors") == 3
    assert set(optimizer.state[parameters[0]]) == {"exp_avg", "exp_avg_sq"}


def test_modules_are_gone_afterwards():
    stage = Stage(Job(1, 1, "h100-sxm:1x1"))
    loaded = {name for name in sys.modules if name.partition(".")[0] in ("transformer_engine", "apex", "amp_C")}
    saved = {name: sys.modules.pop(name) for name in loaded}
    stage.stand_ins.asked = frozenset({"transformer_engine"})
    stage.stand_ins.install()
    import transformer_engine  # noqa: F401

    stage.stand_ins.remove()
    assert "transformer_engine" not in sys.modules and "transformer_engine.pytorch" not in sys.modules
    sys.modules.update(saved)
