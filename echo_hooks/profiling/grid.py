"""The operations that training makes, over the sizes that training uses: a script to be simulated, never run for real.

    echo-launch --simulate --world-size 1 --warmup-steps 0 -m echo_hooks.profiling.grid

Its run directory then names every operation with the layout and arguments that PyTorch itself gives it, forward and
backward, and `echo-sim profile record --grid training` measures them. Sizes are drawn with a fixed seed from what
models have: hidden 512 to 12288, 512 to 16384 tokens, tensor parallel 1 to 8.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
import torch.distributed.fsdp._fully_shard._fsdp_collectives
import torch.nn.functional as F

HIDDEN = (512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192, 12288)
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
SEQUENCES = (512, 1024, 2048, 4096, 8192, 16384)
VOCABULARIES = (32000, 32768, 50257, 50304, 128256)
SHARDS = (1, 1, 1, 2, 4, 8)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MOST_ELEMENTS = 1 << 31
CUDA = torch.device("cuda")


def main() -> None:
    draw = random.Random(0)
    parameter = torch.nn.Parameter(torch.zeros(1, device=CUDA))
    linears(draw)
    attentions(draw)
    unfused_attentions(draw)
    norms(draw)
    pointwise(draw)
    losses(draw)
    optimizers(draw)
    movements(draw)
    parameter.grad = torch.zeros_like(parameter)
    torch.optim.SGD([parameter], lr=0.1).step()


def tensor(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> torch.Tensor:
    return torch.empty(shape, device=CUDA, dtype=dtype, requires_grad=grad)


def backward(output: torch.Tensor) -> None:
    output.backward(torch.empty_like(output))


# ---- products ----


def linears(draw: random.Random, count: int = 700) -> None:
    """Projections of a transformer layer and the head: forward, gradients of input and weight."""
    for i in range(count):
        hidden, tokens, shards = draw.choice(HIDDEN), draw.choice(TOKENS), draw.choice(SHARDS)
        dtype = FP32 if i % 16 == 0 else FP16 if i % 16 == 1 else BF16
        gated = 64 * round(hidden * 8 / 3 / 64)
        n, k = draw.choice(
            (
                (3 * hidden // shards, hidden),
                (hidden // shards, hidden),
                (hidden, hidden // shards),
                (4 * hidden // shards, hidden),
                (hidden, 4 * hidden // shards),
                (2 * gated // shards, hidden),
                (hidden, gated // shards),
                (hidden // 4, hidden),
                (draw.choice(VOCABULARIES) // shards, hidden),
            )
        )
        if dtype is FP32 and tokens * n * k > 1 << 40:
            continue
        x, w = tensor(tokens, k, dtype=dtype, grad=True), tensor(n, k, dtype=dtype, grad=True)
        bias = tensor(n, dtype=dtype, grad=True) if i % 8 == 0 else None
        backward(F.linear(x, w, bias))


def attentions(draw: random.Random, count: int = 110) -> None:
    """Fused attention, causal and not, heads laid out as a projection leaves them."""
    for i in range(count):
        sequence, heads = draw.choice(SEQUENCES), draw.choice((8, 12, 16, 16, 20, 24, 32, 32, 40, 64))
        size, batch = draw.choice((64, 64, 128, 128, 128, 96, 256)), draw.choice((1, 1, 2, 4, 8))
        if batch * sequence * heads * size > 1 << 28 or batch * heads * sequence**2 * size > 1 << 41:
            continue
        dtype = FP16 if i % 12 == 0 else BF16
        q, k, v = (tensor(batch, sequence, heads, size, dtype=dtype, grad=True).transpose(1, 2) for _ in range(3))
        output = F.scaled_dot_product_attention(q, k, v, is_causal=i % 6 != 0)
        backward(output)


def unfused_attentions(draw: random.Random, count: int = 40) -> None:
    """Attention of batched products, a float32 softmax between them (Megatron-core's local implementation)."""
    for _ in range(count):
        sequence, heads = draw.choice((512, 1024, 2048, 4096)), draw.choice((4, 8, 16, 32))
        size, batch = draw.choice((64, 128)), draw.choice((1, 2, 4, 8))
        if batch * heads * sequence**2 > 1 << 29:
            continue
        q, k, v = (tensor(sequence, batch * heads, size, grad=True).transpose(0, 1) for _ in range(3))
        scores = torch.baddbmm(tensor(batch * heads, sequence, sequence), q, k.transpose(1, 2), beta=0.0, alpha=0.1)
        masked = scores.view(batch, heads, sequence, sequence)
        masked = masked.masked_fill(tensor(1, 1, sequence, sequence, dtype=torch.bool), -10000.0)
        probabilities = torch.softmax(masked.float(), dim=-1).to(BF16)
        context = torch.bmm(probabilities.view(batch * heads, sequence, sequence), v)
        context = context.view(batch, heads, sequence, size).permute(2, 0, 1, 3).contiguous()
        backward(context)


# ---- rows and elements ----


def rows(draw: random.Random) -> tuple[int, int]:
    """(tokens, hidden) of an activation."""
    return draw.choice(TOKENS), draw.choice(HIDDEN)


def norms(draw: random.Random, count: int = 110) -> None:
    for i in range(count):
        tokens, hidden = rows(draw)
        dtype = (BF16, FP32, BF16, FP16)[i % 4]
        batch = draw.choice((1, 2, 4))
        x = tensor(batch, tokens // batch, hidden, dtype=dtype, grad=True)
        weight, bias = (tensor(hidden, dtype=dtype, grad=True) for _ in range(2))
        backward(F.layer_norm(x, (hidden,), weight, bias) if i % 2 else F.rms_norm(x, (hidden,), weight))


def pointwise(draw: random.Random, count: int = 190) -> None:
    for i in range(count):
        tokens, hidden = rows(draw)
        hidden *= draw.choice((1, 1, 4))
        dtype = (BF16, FP32, BF16, FP16)[i % 4]
        x, y = tensor(tokens, hidden, dtype=dtype, grad=True), tensor(tokens, hidden, dtype=dtype, grad=True)
        kind = i % 10
        if kind == 0:
            backward(x + y)
        elif kind == 1:
            backward(F.gelu(x, approximate=draw.choice(("none", "tanh"))))
        elif kind == 2:
            backward(F.silu(x) * y)
        elif kind == 3:
            backward(x.to(FP32 if dtype is not FP32 else BF16))
        elif kind == 4:
            backward(x + tensor(hidden, dtype=dtype, grad=True))
        elif kind == 5:
            backward(F.dropout(x, 0.1))
        elif kind == 6:
            backward(x.float() + y if dtype is not FP32 else x + y.bfloat16())
        elif kind == 7:
            _rotated(tokens, draw)
        elif kind == 8:
            backward(x.view(tokens, -1, 64).transpose(0, 1).contiguous())
        else:
            _in_place(x.detach(), y.detach())
        backward((x * 2.0).sum(dim=0) if i % 3 == 0 else x.mean() if i % 3 == 1 else (x * y).sum())


def _rotated(tokens: int, draw: random.Random) -> None:
    """Rotary embedding."""
    heads, size = draw.choice((8, 16, 32)), draw.choice((64, 128))
    q = tensor(1, heads, tokens, size, grad=True)
    cos, sin = tensor(tokens, size), tensor(tokens, size)
    half = size // 2
    backward(q * cos + torch.cat((-q[..., half:], q[..., :half]), dim=-1) * sin)


def _in_place(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y)
    x.mul_(0.5)
    x.div_(2.0)
    x.zero_()
    x.copy_(y)
    x.fill_(1.0)
    x.copy_(y.float() if y.dtype is not FP32 else y.bfloat16())
    x.clone()
    torch.zeros_like(x)
    torch.linalg.vector_norm(x)
    torch.isfinite(x)
    torch.where(y > 0, x, y)
    x.clamp_(min=0.0)
    x.sqrt_()


def losses(draw: random.Random, count: int = 24) -> None:
    """Embedding, softmax over the vocabulary, cross-entropy; Megatron's own sharded cross-entropy."""
    for i in range(count):
        tokens, hidden, vocabulary = draw.choice(TOKENS[:5]), draw.choice(HIDDEN), draw.choice(VOCABULARIES)
        dtype = FP32 if i % 3 == 0 else BF16
        ids = torch.zeros((draw.choice((1, 2)), tokens), dtype=torch.int64, device=CUDA)
        table = tensor(vocabulary, hidden, dtype=dtype, grad=True)
        backward(F.embedding(ids, table))
        if tokens * vocabulary > 1 << 29:
            continue
        logits = tensor(tokens, vocabulary, dtype=dtype, grad=True)
        F.cross_entropy(logits.float(), ids[0]).backward()
        sharded = tensor(tokens, vocabulary // draw.choice(SHARDS), dtype=FP32)
        sharded -= sharded.max(dim=-1)[0].unsqueeze(-1)
        sharded.exp_()
        sharded.div_(sharded.sum(dim=-1).unsqueeze(-1))
        probabilities = torch.softmax(tensor(tokens, draw.choice((8, 64, 128)), grad=True), dim=-1)
        torch.topk(probabilities, 2, dim=-1)


# ---- parameters ----


def parameters(draw: random.Random, layers: int, hidden: int, dtype: torch.dtype, shards: int) -> list[torch.Tensor]:
    """Those of ``layers`` blocks, an embedding and a head."""
    shapes: list[tuple[int, ...]] = [(draw.choice(VOCABULARIES) // shards, hidden)] * 2
    for _ in range(layers):
        shapes += [(hidden // shards, hidden)] * 3 + [(hidden, hidden // shards)]
        shapes += [(4 * hidden // shards, hidden), (hidden, 4 * hidden // shards), *[(hidden,)] * 4]
    return [tensor(*shape, dtype=dtype) for shape in shapes]


def optimizers(draw: random.Random, count: int = 24) -> None:
    """AdamW fused, by foreach and on one flat buffer; clipping; gradients to and from float32."""
    for i in range(count):
        hidden, layers = draw.choice(HIDDEN[:10]), draw.choice((2, 4, 8, 12, 24))
        layers = max(1, min(layers, (1 << 30) // (12 * hidden * hidden)))
        values = parameters(draw, layers, hidden, FP32, draw.choice(SHARDS))
        if i % 4 == 3:
            values = [tensor(sum(v.numel() for v in values))]
            values = [values[0].float()]
        made = [torch.nn.Parameter(v) for v in values]
        gradients = [torch.empty_like(parameter) for parameter in made]
        for parameter, gradient in zip(made, gradients):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(made, 1.0)
        torch.optim.AdamW(made, lr=1e-4, fused=i % 2 == 0, foreach=i % 2 == 1).step()
        halves = [tensor(*v.shape) for v in made]
        torch._foreach_copy_(halves, [p.detach() for p in made])
        torch._foreach_zero_(gradients)


def movements(draw: random.Random, count: int = 48) -> None:
    """cat, split and FSDP's copies in and out of its flat buffers."""
    for i in range(count):
        tokens, hidden = rows(draw)
        parts = draw.choice((2, 3, 4))
        torch.cat([tensor(tokens, hidden) for _ in range(parts)], dim=draw.choice((0, 1)))
        torch.stack([tensor(tokens, hidden) for _ in range(2)])
        whole = tensor(tokens, 3 * hidden, grad=True)
        pieces = whole.split(hidden, dim=1)
        backward(pieces[0].contiguous() + pieces[1] * pieces[2])
        world = draw.choice((2, 4, 8))
        values = parameters(draw, 1, draw.choice(HIDDEN[:10]), (BF16, FP32)[i % 2], 1)[2:]
        _fsdp(values, world)
        index = torch.zeros(tokens, dtype=torch.int64, device=CUDA)
        source = tensor(tokens, hidden, grad=True)
        picked = source.index_select(0, index)
        picked.detach().index_add_(0, index, tensor(tokens, hidden))
        backward(picked)
        torch.sort(tensor(tokens, dtype=FP32))
        torch.cumsum(tensor(tokens, dtype=FP32), 0)


def _fsdp(values: Sequence[torch.Tensor], world: int) -> None:
    """An all-gather's copy in and out, a reduce-scatter's copy in."""
    shards = [torch.empty(v.numel() // world, device=CUDA, dtype=v.dtype) for v in values]
    sizes = [s.numel() for s in shards]
    gathered = torch.empty(sum(sizes) * world, device=CUDA, dtype=values[0].dtype)
    torch.ops.fsdp.all_gather_copy_in(shards, gathered, sizes, sum(sizes), 0)
    out = [torch.empty(world, n, device=CUDA, dtype=values[0].dtype) for n in sizes]
    torch.ops.fsdp.split_with_sizes_copy(gathered.view(world, -1), sizes, dim=1, out=out)
    flat = torch.empty(world, sum(sizes), device=CUDA, dtype=FP32)
    torch.ops.fsdp.chunk_cat([v.detach() for v in values], dim=0, num_chunks=world, out=flat)


if __name__ == "__main__":
    main()
