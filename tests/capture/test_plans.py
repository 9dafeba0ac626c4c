"""Plans: what an op does to metadata, against FakeTensor, and whether a kernel runs for it."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from echo_hooks.capture.plans import key_of
from echo_hooks.devices.pretended import Pretended

pytestmark = pytest.mark.usefixtures("stage")
aten = torch.ops.aten


def key(*values):
    return key_of(values, [])


def test_keys_tell_scalars_of_different_types_apart():
    assert len({key(1), key(1.0), key(True), key(1 + 0j)}) == 4
    assert key([1, 2]) != key([1, 2.0])


def test_keys_tell_metadata_apart(echo):
    tensor = torch.empty(4, 4, device="cuda")
    different = [
        tensor,
        tensor.t(),
        tensor[:2],
        tensor.half(),
        torch.empty(4, 4, device="cuda:1"),
        torch.empty(4, 4),
        torch.empty(4, 4, device="meta"),
    ]
    assert len({key(t) for t in different}) == len(different)
    assert key(tensor) == key(torch.zeros(4, 4, device="cuda"))


def test_a_cached_plan_does_not_confuse_scalar_types(echo):
    integers = torch.ones(3, dtype=torch.int64, device="cuda")
    dtypes = [torch.mul(integers, value).dtype for value in (1, 1.0, True, 1)]
    assert dtypes == [torch.int64, torch.float32, torch.int64, torch.int64]


def test_default_dtype_is_part_of_the_plan(echo):
    assert torch.ones(2, device="cuda").dtype == torch.float32
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.ones(2, device="cuda").dtype == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


# ---- identity and aliases ----


def test_in_place_and_out_return_the_very_argument(echo):
    a, b, c = (torch.ones(3, device="cuda") for _ in range(3))
    assert a.add_(b) is a
    assert torch.add(a, b, out=a) is a
    assert torch.add(a, b, out=c) is c  # the same metadata as the line before
    assert (a.tolist(), b.tolist(), c.tolist()) == ([3.0] * 3, [1.0] * 3, [4.0] * 3)


def test_the_same_tensor_twice_is_read_once(echo):
    a, b = torch.randn(8, device="cuda"), torch.randn(8, device="cuda")
    for other in (a, b, a):
        a.mul(other)
    assert [s.bytes_read for s in echo.signatures[-3:]] == [32, 64, 32]


def test_views_share_storage_and_launch_nothing(echo):
    base = torch.empty(6, 8, device="cuda")
    before = len(echo.program)
    views = [
        base.view(48), base.t(), base[1], base[:, 2:4], base[..., None], base.expand(2, 6, 8), base.detach(),
        base.unflatten(1, (2, 4)), base.diagonal(), base.unfold(1, 2, 2), base.permute(1, 0), base.narrow(0, 1, 2),
        *base.split(2), *base.chunk(2, 1), *base.unbind(0), base.as_strided((2,), (1,), 3),
        aten._unsafe_view.default(base, [48]), base.view(torch.int32), base.movedim(0, 1), base.squeeze(), base.mT,
    ]  # fmt: skip
    assert all(v.echo_storage is base.echo_storage for v in views)
    assert len(echo.program) == before


def test_offsets_of_views_of_views(echo):
    base = torch.empty(100, device="cuda")
    view = base[10:20]
    assert view[3:].storage_offset() == 13
    assert view.as_strided((2,), (1,)).storage_offset() == 10
    assert view.as_strided((2,), (1,), 5).storage_offset() == 5  # from the start of the storage
    assert view[3:].data_ptr() - base.data_ptr() == 13 * 4


def test_metadata_changed_in_place(echo):
    tensor = torch.arange(6.0, device="cuda").view(2, 3)
    row = torch.empty(3, device="cuda")
    before = len(echo.program)
    assert tensor.t_() is tensor and tensor.shape == (3, 2) and tensor.stride() == (1, 3)
    assert row.unsqueeze_(0).shape == row.shape == (1, 3)
    assert row.squeeze_().shape == (3,)
    row.data = torch.empty(3, device="cuda")
    assert len(echo.program) == before  # no kernel
    assert tensor.tolist() == [[0, 3], [1, 4], [2, 5]]
    (tensor.requires_grad_() * 1).t_().sum().backward()
    assert tensor.grad.shape == (3, 2)


def test_resize_and_out_grow_the_storage(echo):
    tensor = torch.empty(3, device="cuda")
    assert tensor.resize_(5).shape == (5,) and tensor.untyped_storage().size() == 20
    tensor.resize_(2)
    assert tensor.shape == (2,) and tensor.untyped_storage().size() == 20  # never shrinks
    out = torch.empty(0, device="cuda")
    assert torch.cat([torch.ones(2, device="cuda")] * 2, out=out) is out
    assert out.shape == (4,) and out.untyped_storage().size() == 16


def test_set_takes_the_sources_memory(echo):
    one, other = torch.zeros(3, device="cuda"), torch.ones(5, device="cuda")
    one.set_(other)
    one.add_(1)
    assert one.shape == (5,) and other.tolist() == [2.0] * 5


def test_nothing_is_launched_for_empty_tensors_and_bare_allocations(echo):
    empty = torch.empty(0, 4, device="cuda")
    before = len(echo.program)
    (empty + 1).sum(1)
    torch.cat([empty, empty])
    empty.clone()
    torch.empty_like(empty)
    torch.empty(5, device="cuda").new_empty(3)
    assert len(echo.program) == before


def test_what_goes_to_the_meta_device_is_meta(echo):
    tensor = torch.empty(3, 4, device="cuda")
    for meta in (tensor.to("meta"), torch.empty_like(tensor, device="meta"), tensor.new_zeros(3, device="meta")):
        assert type(meta) is torch.Tensor and meta.is_meta
    assert echo.capture.memory.allocator.allocated_bytes == 512


# ---- agreement with FakeTensor ----


def metas(result):
    tensors = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
    return [(tuple(t.shape), t.stride(), t.dtype, t.storage_offset(), t.device) for t in tensors]


F, INT, B = torch.float32, torch.int64, torch.bool
M, N3 = ((4, 6), F), ((2, 4, 6), F)
IMAGE, KERNEL = ((2, 3, 8, 8), F), ((4, 3, 3, 3), F)
HEADS = ((2, 4, 16, 8), torch.bfloat16)
CASES = [
    (aten.add.Tensor, [M, M]),
    (aten.add.Tensor, [M, ((6,), torch.float16)]),
    (aten.add.Tensor, [M, 2]),
    (aten.mul.Tensor, [((4, 6), INT), 2.5]),
    (aten.div.Tensor, [((4, 6), INT), ((4, 6), INT)]),
    (aten.mm.default, [M, ((6, 5), F)]),
    (aten.addmm.default, [((5,), F), M, ((6, 5), F)]),
    (aten.bmm.default, [N3, ((2, 6, 3), F)]),
    (aten.baddbmm.default, [((2, 4, 3), F), N3, ((2, 6, 3), F)]),
    (aten.convolution.default, [IMAGE, KERNEL, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1]),
    (aten.convolution_backward.default,
     [((2, 4, 6, 6), F), IMAGE, KERNEL, [4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True]]),
    (aten.native_layer_norm.default, [N3, [6], ((6,), F), ((6,), F), 1e-5]),
    (aten.native_layer_norm_backward.default,
     [N3, N3, [6], ((2, 4, 1), F), ((2, 4, 1), F), ((6,), F), ((6,), F), [True, True, True]]),
    (aten.native_group_norm.default, [IMAGE, ((3,), F), ((3,), F), 2, 3, 64, 3, 1e-5]),
    (aten.native_batch_norm.default, [IMAGE, ((3,), F), ((3,), F), ((3,), F), ((3,), F), True, 0.1, 1e-5]),
    (aten._softmax.default, [N3, -1, False]),
    (aten._log_softmax_backward_data.default, [M, M, 1, F]),
    (aten.nll_loss_forward.default, [M, ((4,), INT), None, 1, -100]),
    (aten.embedding.default, [((10, 6), F), ((2, 3), INT)]),
    (aten.embedding_dense_backward.default, [((2, 3, 6), F), ((2, 3), INT), 10, -1, False]),
    (aten.gelu.default, [N3]),
    (aten.silu_backward.default, [N3, N3]),
    (aten.native_dropout.default, [N3, 0.1, True]),
    (aten.sum.dim_IntList, [N3, [0, 1], False]),
    (aten.sum.dim_IntList, [((4,), torch.int32), [0]]),
    (aten.mean.dim, [N3, [1], True]),
    (aten.var_mean.correction, [N3, [2]]),
    (aten.max.dim, [N3, 1]),
    (aten.argmax.default, [M]),
    (aten.amax.default, [N3, [0]]),
    (aten.sort.default, [M]),
    (aten.topk.default, [M, 2]),
    (aten.cumsum.default, [M, 0]),
    (aten.gather.default, [M, 1, ((4, 2), INT)]),
    (aten.scatter_add.default, [M, 1, ((4, 6), INT), M]),
    (aten.index_select.default, [M, 0, ((3,), INT)]),
    (aten.index.Tensor, [N3, [None, ((3,), INT)]]),
    (aten.index_put.default, [M, [((3,), INT)], ((3, 6), F)]),
    (aten.where.self, [((4, 6), B), M, M]),
    (aten.masked_fill.Scalar, [M, ((4, 6), B), 0.0]),
    (aten.cat.default, [[M, ((2, 6), F)], 0]),
    (aten.stack.default, [[M, M], 1]),
    (aten.split_with_sizes.default, [N3, [1, 3], 1]),
    (aten.split.Tensor, [M, 2, 1]),
    (aten.unbind.int, [N3, 1]),
    (aten.slice.Tensor, [N3, 1, 1, 3]),
    (aten.select.int, [N3, 0, 1]),
    (aten.transpose.int, [N3, 0, 2]),
    (aten.permute.default, [N3, [2, 0, 1]]),
    (aten.view.default, [N3, [8, 6]]),
    (aten.expand.default, [((1, 6), F), [4, 6]]),
    (aten.as_strided.default, [M, [3], [2], 1]),
    (aten.unfold.default, [M, 1, 3, 2]),
    (aten.t.default, [M]),
    (aten.clone.default, [M]),
    (aten._to_copy.default, [M]),
    (aten.contiguous.default, [M]),
    (aten.pow.Tensor_Scalar, [M, 2]),
    (aten.rsqrt.default, [((4, 6), INT)]),
    (aten.eq.Scalar, [M, 0]),
    (aten.tril.default, [M]),
    (aten.roll.default, [M, [1], [0]]),
    (aten.flip.default, [M, [0]]),
    (aten.constant_pad_nd.default, [M, [1, 2], 0.0]),
    (aten.repeat.default, [M, [2, 1]]),
    (aten.max_pool2d_with_indices.default, [IMAGE, [2, 2], [2, 2]]),
    (aten.upsample_nearest2d.default, [IMAGE, [16, 16]]),
    (aten._adaptive_avg_pool2d.default, [IMAGE, [2, 2]]),
    (aten._foreach_add.List, [[M, ((3,), F)], [M, ((3,), F)]]),
    (aten._foreach_norm.Scalar, [[M, ((3,), F)], 2]),
    (aten._scaled_dot_product_flash_attention.default, [HEADS, HEADS, HEADS, 0.0, True]),
    (aten._scaled_dot_product_efficient_attention.default, [HEADS, HEADS, HEADS, None, True]),
    (aten.linalg_vector_norm.default, [M, 2]),
    (aten.logsumexp.default, [M, [1]]),
    (aten.bitwise_and.Tensor, [((4,), B), ((4,), B)]),
]  # fmt: skip
TRANSPOSED = [
    aten.add.Tensor, aten.mm.default, aten.clone.default, aten._softmax.default, aten.gelu.default, aten.cat.default,
    aten.sum.dim_IntList, aten.where.self, aten.t.default, aten.cumsum.default, aten.sort.default,
]  # fmt: skip


def made(spec, device, transposed=False):
    """Tensors of one case: (shape, dtype) becomes a tensor, transposed in memory if wanted."""
    is_tensor = lambda s: isinstance(s, tuple) and len(s) == 2 and isinstance(s[1], torch.dtype)  # noqa: E731

    def tensor(s):
        if not is_tensor(s):
            return s
        shape, dtype = s
        if transposed and len(shape) >= 2:
            return torch.empty(*shape[:-2], shape[-1], shape[-2], dtype=dtype, device=device).mT
        return torch.empty(shape, dtype=dtype, device=device)

    return tree_map(tensor, spec, is_leaf=is_tensor)


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_metadata_is_that_of_a_fake_tensor(stage, watch, transposed):
    echo = watch()
    cases = [c for c in CASES if not transposed or c[0] in TRANSPOSED]
    ours = {}
    for number, (func, arguments) in enumerate(cases):
        for _ in range(2):  # first from FakeTensor, then from the cache
            result = func(*made(arguments, "cuda:0", transposed))
            found = metas(result)
            assert ours.setdefault(number, found) == found
            assert all(isinstance(t, Pretended) for t in tree_leaves(result) if isinstance(t, torch.Tensor)), func
    echo.capture.stop()
    try:
        with FakeTensorMode():
            for number, (func, arguments) in enumerate(cases):
                assert ours[number] == metas(func(*made(arguments, "cuda:0", transposed))), func
    finally:
        echo.capture.start()


def test_plans_cost_no_random_numbers(echo):
    before = torch.get_rng_state()
    weight = torch.randn(4, 4, device="cuda")
    torch.nn.init.kaiming_uniform_(weight)
    torch.nn.functional.dropout(weight, 0.5)
    torch.randperm(5, device="cuda")
    torch.bernoulli(weight)
    torch.rand_like(weight)
    torch.randint(3, (2,), device="cuda")
    torch.multinomial(weight.abs(), 2)
    assert torch.equal(before, torch.get_rng_state())
