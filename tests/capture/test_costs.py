"""FLOPs and bytes of operations, by hand: a multiply-add counts two, every distinct tensor once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("stage")
aten = torch.ops.aten


@pytest.fixture
def cost(echo):
    """``cost(call)``: (flops, bytes read, bytes written) of the last kernel of a call."""

    def run(call):
        call()
        last = echo.signatures[-1]
        return last.flops, last.bytes_read, last.bytes_written

    return run


def t(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="cuda")


def test_matrix_products(cost):
    m, n, k = 128, 64, 32
    assert cost(lambda: t(m, k) @ t(k, n)) == (2 * m * n * k, 2 * (m * k + k * n), 2 * m * n)
    assert cost(lambda: torch.addmm(t(n), t(m, k), t(k, n))) == (2 * m * n * k, 2 * (n + m * k + k * n), 2 * m * n)
    assert cost(lambda: torch.bmm(t(4, m, k), t(4, k, n))) == (8 * m * n * k, 8 * (m * k + k * n), 8 * m * n)
    # An expanded operand is read once; the transposed one is no other.
    assert cost(lambda: torch.bmm(t(1, m, k).expand(4, m, k), t(4, n, k).mT)) == (
        8 * m * n * k,
        2 * m * k + 8 * k * n,
        8 * m * n,
    )


def test_convolution(cost):
    # Each of 2 x 4 x 6 x 6 results: 3 x 3 x 3 multiply-adds.
    flops, read, written = cost(lambda: nn.functional.conv2d(t(2, 3, 8, 8), t(4, 3, 3, 3)))
    assert (flops, read, written) == (2 * 288 * 27, 2 * (384 + 108), 2 * 288)


def test_attention(echo):
    q = t(2, 8, 512, 64)
    nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    attention = echo.signatures[-1]
    assert attention.flops == 2 * 2 * 2 * 8 * 512 * 512 * 64  # both products, the whole square
    assert attention.attr("causal") is True
    assert attention.bytes_read == q.numel() * 2  # q, k and v are one tensor
    k, v = t(2, 8, 512, 64), t(2, 8, 512, 64)
    nn.functional.scaled_dot_product_attention(q, k, v)
    assert echo.signatures[-1].bytes_read == 3 * q.numel() * 2 and echo.signatures[-1].attr("causal") is False


def test_lookups_touch_rows_not_tables(cost):
    table, tokens = t(50_000, 64), torch.zeros(4, 16, dtype=torch.int64, device="cuda")
    rows = 64 * 64 * 2
    assert cost(lambda: nn.functional.embedding(tokens, table)) == (0, rows + 512, rows)
    assert cost(lambda: table.index_select(0, tokens[0])) == (0, 16 * 128 + 128, 16 * 128)
    assert cost(lambda: table[tokens[0]]) == (0, 16 * 128 + 128, 16 * 128)


def test_writes_into_rows_touch_rows_not_tables(cost):
    table, rows = t(50_000, 64), torch.arange(16, device="cuda")
    values = t(16, 64)
    moved = 16 * 64 * 2
    assert cost(lambda: table.index_put_((rows,), values)) == (0, moved + 128, moved)
    assert cost(lambda: table.index_copy_(0, rows, values)) == (0, moved + 128, moved)
    # Adding reads what it adds to.
    assert cost(lambda: table.index_add_(0, rows, values)) == (0, 2 * moved + 128, moved)
    index = rows[:, None].expand(16, 64)
    assert cost(lambda: table.scatter_add_(0, index, values)) == (0, 2 * moved + 128, moved)


def test_elementwise(cost):
    a, b = t(1000), t(1000)
    assert cost(lambda: a + b) == (0, 4000, 2000)
    assert cost(lambda: a.add_(b)) == (0, 4000, 2000)
    assert cost(lambda: a.copy_(b)) == (0, 2000, 2000)
    assert cost(lambda: a.zero_()) == (0, 0, 2000)
    assert cost(lambda: torch.zeros(500, device="cuda")) == (0, 0, 2000)
    assert cost(lambda: torch.zeros_like(a)) == (0, 0, 2000)  # looks at metadata alone
    assert cost(lambda: torch.rand_like(a)) == (0, 0, 2000)
    assert cost(lambda: a.new_zeros(10)) == (0, 0, 20)
    assert cost(lambda: a.float()) == (0, 2000, 4000)
    assert cost(lambda: a.sum(dtype=torch.float32)) == (0, 2000, 4)


def test_cat_and_foreach(echo, cost):
    assert cost(lambda: torch.cat([t(10, 4), t(6, 4)])) == (0, 128, 128)
    xs, ys = [t(100), t(28)], [t(100), t(28)]
    assert cost(lambda: torch._foreach_add_(xs, ys)) == (0, 512, 256)
    assert echo.signatures[-1].attr("tensors") == 2


def test_fused_adamw(echo):
    """Reads parameter, gradient and both moments, writes all but the gradient."""
    model = nn.Linear(1000, 10, bias=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.empty(2, 1000, device="cuda")).sum().backward()
    optimizer.step()
    adam = echo.signatures[-1]
    assert adam.name.startswith("aten._fused_adamw_")
    assert adam.bytes_read == pytest.approx(4 * 40_000, abs=8)
    assert adam.bytes_written == pytest.approx(3 * 40_000, rel=0.35)


def test_tf32_is_said_of_float32_products(echo):
    a = t(8, 8, dtype=torch.float32)
    a @ a
    assert echo.signatures[-1].attr("tf32") is False
