"""A call rebuilt from its signature has the signature that it was built from, and random operands."""

from __future__ import annotations

import pytest
import torch

from echo_hooks.capture.costs import signature
from echo_hooks.graph.ops import OpSignature, TensorMeta
from echo_hooks.profiling import rebuild as module
from echo_hooks.profiling.rebuild import CannotRebuild, rebuild

aten = torch.ops.aten
CPU = torch.device("cpu")


def arguments(found: OpSignature, device: torch.device = CPU):
    return module._arguments(module._op(found.name), found, device, torch.Generator().manual_seed(1))


def described(func, *args, **kwargs) -> OpSignature:
    """The signature of a call on a device, here the meta device: a CPU tensor would be one that stayed on the host."""
    args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
    return signature(func, args, kwargs, func(*args, **kwargs), [])


def again(func, *args, **kwargs) -> None:
    """The rebuilt call runs and has the same signature."""
    found = described(func, *args, **kwargs)
    rebuild(found, CPU, torch.Generator())()
    made, named = arguments(found, torch.device("meta"))
    assert signature(func, made, named, func(*made, **named), []) == found


def test_layouts_and_arguments_come_back():
    x, w = torch.ones(6, 8), torch.ones(4, 8)
    again(aten.mm.default, x, w.t())
    again(aten.addmm.default, torch.ones(4), x, w.t())
    again(aten.baddbmm.default, torch.ones(2, 3, 3), torch.ones(2, 3, 4), torch.ones(2, 4, 3), beta=0.0, alpha=0.5)
    again(aten.native_layer_norm.default, x, [8], torch.ones(8), None, 1e-5)
    again(aten._softmax.default, x, -1, False)
    again(aten.sum.dim_IntList, x, [0], True)
    again(aten._to_copy.default, x, dtype=torch.bfloat16)
    again(aten.cat.default, [x, x.clone(), torch.ones(1, 8)], 0)
    again(aten._foreach_add_.List, [torch.ones(3), torch.ones(2)], [torch.ones(3), torch.ones(2)], alpha=0.1)
    again(aten.add.Tensor, x, x)
    again(aten.zeros.default, [3, 4], dtype=torch.float32, device="meta")
    again(aten.slice_backward.default, torch.ones(2, 8), [6, 8], 0, 3, 5, 1)
    again(aten.clone.default, x.t(), memory_format=torch.contiguous_format)
    again(aten.pow.Tensor_Scalar, x, 2)


def test_a_number_that_chooses_no_kernel_makes_no_other_call():
    x = torch.ones(4)
    texts = {described(aten.mul.Scalar, x, n).call for n in (0.5, 2.0)}
    assert texts == {'[["T","~"],{}]'}
    powers = {described(aten.pow.Tensor_Scalar, x, n).call for n in (2.0, 3.0)}
    assert len(powers) == 2


def test_indices_stay_inside_their_table():
    found = described(aten.embedding.default, torch.ones(5, 3), torch.zeros(1000, dtype=torch.int64))
    (table, ids), _ = arguments(found)
    assert ids.min() >= 0 and ids.max() == 4 and table.std() > 0.1


def test_operands_are_random_and_step_flags_are_not():
    metas = tuple(TensorMeta((64,), "float32") for _ in range(3))
    call = '[[{"L":["T"]},"T","T"],{}]'
    found = OpSignature("aten._amp_foreach_non_finite_check_and_unscale_.default", metas, call=call)
    (gradients, infinite, scale), _ = arguments(found)
    assert gradients[0].std() > 0.5 and not infinite.any() and (scale == 1).all()


@pytest.mark.parametrize(
    ("name", "call", "why"),
    [
        ("aten.from_file.default", '[["x"],{}]', "no operation that the registry knows"),
        ("os.system.default", "[[],{}]", "no operation that the registry knows"),
        ("aten.__class__.default", "[[],{}]", "no operation that the registry knows"),
        ("aten.mm.nonsense", "[[],{}]", "no such op"),
        ("aten.mm.default", "", "left no arguments"),
        ("aten.mm.default", '[["T","T","T"],{}]', "do not fit"),
        ("aten.mm.default", '[["T"],{}]', "other tensors"),
        ("aten.mm.default", '[[["T",-1,1],"T"],{}]', "do not fit"),
        ("aten.mm.default", '[[["T",1000000000000,1],"T"],{}]', "larger than any device"),
        ("aten.mm.default", "[" * 100_000, "do not fit"),
        ("aten.cat.default", '[[{"T":1000000000}],{}]', "do not fit"),
        ("aten.sum.default", '[["T"],{"dtype":["dtype","__name__"]}]', "do not fit"),
    ],
)
def test_hostile_signatures_are_refused(name, call, why):
    found = OpSignature(name, (TensorMeta((4, 4), "float32"), TensorMeta((4, 4), "float32")), call=call)
    with pytest.raises(CannotRebuild, match=why):
        rebuild(found, CPU, torch.Generator())


def test_masks_have_as_many_places_as_there_are_values():
    mask = torch.zeros(4, 8, dtype=torch.bool)
    again(aten.masked_scatter.default, torch.ones(4, 8), mask, torch.ones(5))
    again(aten.masked_scatter.default, torch.ones(4, 8), mask, torch.ones(64))
