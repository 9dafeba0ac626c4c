"""Kernel times measured on two H200, each with the op signature that the workload's dimensions give it.

Kineto traces of a 12-layer, 2048-wide GPT (16 heads, sequence 2048, vocabulary 32768) on two GPUs: ddp.rank0
(micro-batch 4, autocast to bfloat16), fsdp2_tp2.rank0 (the same in bfloat16, tensor parallel 2), mcore_pp2.rank0 and
.rank1 (16 layers in two stages, micro-batch 1, unfused attention). They record no shapes, so each sample names op,
kernel and launch grid, and the shapes follow from the dimensions. The overlap table has single kernels in a loop
(column base_us), the shape in their name.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from statistics import median

from echo_hooks.graph.ops import OpSignature, TensorMeta
from echo_hooks.timing.classes import tensor_bytes

TRACES = ("ddp.rank0", "fsdp2_tp2.rank0", "mcore_pp2.rank0", "mcore_pp2.rank1")
ROWS, HIDDEN, VOCABULARY = 4 * 2048, 2048, 32768
MI = 1 << 20


@dataclass(frozen=True)
class Sample:
    """A measured time of one op; ``parameter``: the share it tells about ("compute" or "bandwidth")."""

    efficiency_class: str
    signature: OpSignature
    measured_us: float
    parameter: str = "bandwidth"
    kernels: int = 1
    label: str = ""


@dataclass(frozen=True)
class Kernel:
    """One kernel, copy or memset of a trace: the ATen ops open at its launch, outermost first, name, blocks, bytes.

    ``alone``: no NCCL kernel ran at the same time, which would have slowed it down.
    """

    ops: tuple[str, ...]
    name: str
    blocks: int
    bytes: int
    duration_us: float
    alone: bool


def read_trace(path: Path) -> list[Kernel]:
    """Device activities of a Kineto trace in order of launch, joined to CPU ops by correlation id."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    device = {e["args"]["correlation"]: e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")}
    nccl = [(e["ts"], e["ts"] + e["dur"]) for e in device.values() if e["name"].startswith("nccl")]
    threads = defaultdict(list)
    for event in events:
        if event.get("cat") in ("cpu_op", "cuda_runtime", "cuda_driver"):
            threads[event["tid"]].append(event)
    found = []
    for host in threads.values():
        host.sort(key=lambda e: (e["ts"], -e["dur"]))
        open_ops: list[dict] = []
        for event in host:
            while open_ops and open_ops[-1]["ts"] + open_ops[-1]["dur"] <= event["ts"]:
                open_ops.pop()
            if event["cat"] == "cpu_op":
                open_ops.append(event)
            elif (launched := device.get(event["args"].get("correlation"))) is not None:
                ops = tuple(o["name"].removeprefix("aten::") for o in open_ops)
                args, start, duration = launched["args"], launched["ts"], launched["dur"]
                alone = not any(begin < start + duration and start < end for begin, end in nccl)
                sizes = args.get("grid", [0])[0], args.get("bytes", 0)
                found.append((event["ts"], Kernel(ops, launched["name"], *sizes, duration, alone)))
    return [kernel for _, kernel in sorted(found, key=lambda pair: pair[0])]


def load(traces: Path, overlap_csv: Path) -> list[Sample]:
    """All samples; SystemExit says which kernel is missing when the files are other ones."""
    ddp, fsdp, mcore, last = (read_trace(traces / f"{name}.json.gz") for name in TRACES)
    samples = [
        *products(ddp, fsdp, mcore),
        *attentions(ddp, fsdp),
        *pointwise_ops(ddp, fsdp, mcore, last),
        *row_ops(ddp, fsdp, mcore, last),
        *optimizer_ops(ddp, mcore),
        *data_movement(ddp, fsdp, mcore),
        *loops(overlap_csv),
    ]
    return [s for s in samples if not isnan(s.measured_us)]  # some kernels always ran beside an all-reduce


# ---- signatures ----


def meta(dtype: str, *shape: int, contiguous: bool = True) -> TensorMeta:
    return TensorMeta(shape, dtype, contiguous)


def op(name: str, inputs: list[TensorMeta], outputs: list[TensorMeta], *, read=None, written=None, flops=0, **attrs):
    """A signature that reads its inputs and writes its outputs once, where ``read``, ``written`` do not say better."""
    read = sum(map(tensor_bytes, inputs)) if read is None else read
    written = sum(map(tensor_bytes, outputs)) if written is None else written
    return OpSignature(name, tuple(inputs), tuple(outputs), flops, read, written, tuple(attrs.items()))


def product(m: int, n: int, k: int, batch: int = 0, dtype: str = "bfloat16") -> OpSignature:
    lead = (batch,) if batch else ()
    a, b, c = meta(dtype, *lead, m, k), meta(dtype, *lead, k, n), meta(dtype, *lead, m, n)
    return op("aten.bmm.default" if batch else "aten.mm.default", [a, b], [c], flops=2 * max(batch, 1) * m * n * k)


def attention(batch: int, heads: int, sequence: int, head_dim: int, *, backward: bool = False) -> OpSignature:
    """Causal attention; the FLOPs count all scores, as those of torch.utils.flop_counter do."""
    qkv = meta("bfloat16", batch, heads, sequence, head_dim)
    name = "aten._scaled_dot_product_cudnn_attention"
    flops = 2 * batch * heads * sequence * sequence * head_dim
    if backward:
        return op(f"{name}_backward.default", [qkv] * 5, [qkv] * 3, flops=5 * flops, causal=True)
    return op(f"{name}.default", [qkv] * 3, [qkv], flops=2 * flops, causal=True)


def pointwise(name: str, inputs: str, output: str, elements: int) -> OpSignature:
    """``inputs``: dtypes, space-separated; every operand has all the elements."""
    return op(f"aten.{name}", [meta(d, elements) for d in inputs.split()], [meta(output, elements)])


# ---- picking kernels ----


def middle(kernels: list[Kernel], leaf: str, name: str = "", *, blocks: int = 0, bytes: int = 0) -> float:
    """Median time of the kernels that ``leaf`` launched, by part of their name, blocks along x, or bytes copied.

    Only of those that ran alone; NaN when none did.
    """
    found = [k for k in kernels if k.ops[-1:] == (leaf,) and name in k.name]
    found = [k for k in found if blocks in (0, k.blocks) and bytes in (0, k.bytes)]
    if not found:
        raise SystemExit(
            f"no kernel {name!r} of {blocks or bytes} blocks or bytes under {leaf!r}: are these the traces?"
        )
    return median_alone(found)


def median_alone(kernels: list[Kernel]) -> float:
    return median([k.duration_us for k in kernels if k.alone] or [nan])


def products(ddp: list[Kernel], fsdp: list[Kernel], mcore: list[Kernel]) -> Iterator[Sample]:
    """Matrix products in the order in which the model issues them; medians over layers and steps."""
    for label, kernels, shards in (("ddp", ddp, 1), ("fsdp2_tp2", fsdp, 2)):
        part, up = HIDDEN // shards, 4 * HIDDEN // shards
        layer = [(part, HIDDEN)] * 3 + [(HIDDEN, part), (up, HIDDEN), (HIDDEN, up)]  # (n, k) of q, k, v, o, up, down
        found = [k for k in kernels if k.ops[-1:] == ("mm",) and k.blocks]
        step = 3 * (12 * len(layer) + 1)  # forward and twice as many backward; the head counts one
        if len(found) != 2 * step:
            raise SystemExit(f"{label}: {len(found)} products instead of {2 * step}: are these the traces?")
        for i, (n, k) in enumerate(layer):
            same = [found[s * step + 6 * b + i] for s in (0, 1) for b in range(12)]
            yield Sample("gemm", product(ROWS, n, k), median_alone(same), "compute", label=f"{label} forward")
        backward = 12 * len(layer) + 3  # past the head's two; then each linear's weight gradient, input gradient
        for i, (n, k) in enumerate(reversed(layer[2:])):
            for j, shape in enumerate(((n, k, ROWS), (ROWS, k, n))):
                same = [found[s * step + backward + 12 * b + 2 * i + j] for s in (0, 1) for b in range(12)]
                yield Sample("gemm", product(*shape), median_alone(same), "compute", label=f"{label} backward")
    forward = [k for k in mcore if "nvjet" in k.name and not any("Backward" in name for name in k.ops)]
    layer_of_mcore = (
        ("compute", product(2048, 3 * HIDDEN, HIDDEN)),
        ("bandwidth", product(2048, 2048, 128, batch=16)),
        ("bandwidth", product(2048, 128, 2048, batch=16)),
        ("compute", product(2048, HIDDEN, HIDDEN)),
        ("compute", product(2048, 4 * HIDDEN, HIDDEN)),
        ("compute", product(2048, HIDDEN, 4 * HIDDEN)),
    )
    for i, (parameter, signature) in enumerate(layer_of_mcore):
        yield Sample("gemm", signature, median_alone(forward[i::6]), parameter, label="mcore forward")


def attentions(ddp: list[Kernel], fsdp: list[Kernel]) -> Iterator[Sample]:
    for kernels, heads in ((ddp, 16), (fsdp, 8)):
        forward = middle(kernels, "_cudnn_attention_forward", "fprop")
        yield Sample("attention_forward", attention(4, heads, 2048, 128), forward, "compute")
        parts = ("compute_dot_do_o", "bprop", "convert_dq")
        backward = sum(middle(kernels, "_cudnn_attention_backward", part) for part in parts)
        yield Sample(
            "attention_backward", attention(4, heads, 2048, 128, backward=True), backward, "compute", kernels=3
        )


def pointwise_ops(ddp: list[Kernel], fsdp: list[Kernel], mcore: list[Kernel], last: list[Kernel]) -> Iterator[Sample]:
    """``last``: the last pipeline stage, which has the loss. Vectorised kernels do 1024 elements per block."""

    def plain(kernels: list[Kernel], name: str, inputs: str, output: str, kernel: str, blocks: int, per_block=1024):
        leaf = name.split(".")[0]
        measured = middle(kernels, "copy_" if leaf == "_to_copy" else leaf, kernel, blocks=blocks)
        return pointwise(name, inputs, output, blocks * per_block), measured

    f32, bf16 = "float32", "bfloat16"
    for blocks in (4096, 16384, 65536, 262144):
        yield Sample("elementwise", *plain(ddp, "_to_copy.default", f32, bf16, "bfloat16_copy", blocks))
    for blocks in (4096, 16384, 65536):
        yield Sample("elementwise", *plain(ddp, "mul.Tensor", f32, f32, "AUnaryFunctor", blocks))
    for blocks in (2048, 8192, 65536):
        yield Sample("elementwise", *plain(fsdp, "addcdiv_.default", f"{f32} {f32} {f32}", f32, "", blocks))
        yield Sample("elementwise", *plain(fsdp, "sqrt.default", f32, f32, "", blocks))
    yield Sample("elementwise", *plain(fsdp, "add.Tensor", f"{bf16} {bf16}", bf16, "vectorized", 16384))
    yield Sample("elementwise", *plain(ddp, "add_.Tensor", f"{f32} {f32}", f32, "vectorized", 16384))
    yield Sample("elementwise", *plain(last, "exp.default", f32, f32, "", 65536))
    for mebibytes in (16, 64, 256):
        measured = middle(ddp, "copy_", "Memcpy DtoD", bytes=mebibytes * MI)
        yield Sample("elementwise", pointwise("copy_.default", f32, f32, mebibytes * MI // 4), measured)

    for blocks in (8192, 32768, 131072, 524288):
        yield Sample("cast", *plain(ddp, "_to_copy.default", bf16, f32, "direct_copy", blocks, 512))
    yield Sample("cast", *plain(ddp, "add.Tensor", f"{f32} {bf16}", f32, "unrolled", 32768, 512))
    for blocks in (8192, 24576, 32768, 131072):
        yield Sample("cast", *plain(mcore, "add_.Tensor", f"{f32} {bf16}", f32, "unrolled", blocks, 512))

    scores, mask = meta(f32, 1, 16, 2048, 2048), meta("bool", 1, 1, 2048, 2048)
    yield Sample("strided", op("aten.masked_fill_.Scalar", [scores, mask], [scores]), middle(mcore, "masked_fill_"))
    permuted, copied = meta(bf16, 2048, 16, 128, contiguous=False), meta(bf16, 2048, 16, 128)
    measured = middle(mcore, "copy_", "elementwise_kernel<128, 4", blocks=8192)
    yield Sample("strided", op("aten.clone.default", [permuted], [copied]), measured)
    logits, column = meta(f32, 2048, 1, VOCABULARY), meta(f32, 2048, 1, 1)
    for name in ("sub_", "div_"):
        yield Sample(
            "strided", op(f"aten.{name}.Tensor", [logits, column], [logits]), middle(last, name, blocks=262144)
        )
    tokens, positions = meta(f32, 4, 2048, HIDDEN), meta(f32, 2048, HIDDEN)
    yield Sample("strided", op("aten.add.Tensor", [tokens, positions], [tokens]), middle(ddp, "add", blocks=65536))

    for kernels, blocks in ((ddp, 65536), (fsdp, 32768), (mcore, 16384)):
        yield Sample("activation", *plain(kernels, "gelu.default", bf16, bf16, "", blocks))
        yield Sample("activation", *plain(kernels, "gelu_backward.default", f"{bf16} {bf16}", bf16, "", blocks))


def row_ops(ddp: list[Kernel], fsdp: list[Kernel], mcore: list[Kernel], last: list[Kernel]) -> Iterator[Sample]:
    for kernels, dtype, rows in ((ddp, "float32", ROWS), (fsdp, "bfloat16", ROWS), (mcore, "bfloat16", 2048)):
        x, name = meta(dtype, rows, HIDDEN), "native_layer_norm"
        yield Sample("norm", op(f"aten.{name}.default", [x], [x]), middle(kernels, name, "vectorized", blocks=rows))
        name = "native_layer_norm_backward"
        both = middle(kernels, name, "grad_input", blocks=rows) + middle(kernels, name, "GammaBeta")
        yield Sample("norm_backward", op(f"aten.{name}.default", [x, x], [x]), both, kernels=2)
        found = meta(dtype, rows, HIDDEN)
        inputs, read = [meta(dtype, VOCABULARY, HIDDEN), meta("int64", rows)], tensor_bytes(found) + 8 * rows
        signature = op("aten.embedding.default", inputs, [found], read=read)
        yield Sample("gather", signature, middle(kernels, "gather", "vectorized_gather", blocks=rows))

    wide, square = meta("float32", ROWS, VOCABULARY), meta("float32", 16 * 2048, 2048)
    for kernels, x, name in ((ddp, wide, "_log_softmax"), (mcore, square, "_softmax")):
        yield Sample("softmax", op(f"aten.{name}.default", [x], [x]), middle(kernels, name))
        name += "_backward_data"
        yield Sample("softmax_backward", op(f"aten.{name}.default", [x, x], [x]), middle(kernels, name))

    for kernels, dtype in ((ddp, "float32"), (fsdp, "bfloat16")):
        signature = op("aten.sum.dim_IntList", [meta(dtype, 4, 2048, HIDDEN)], [meta(dtype, 2048, HIDDEN)])
        yield Sample("reduction", signature, middle(kernels, "sum", blocks=8192))
    for name in ("max", "sum"):
        signature = op(f"aten.{name}.dim", [meta("float32", 2048, VOCABULARY)], [meta("float32", 2048)])
        yield Sample("reduction", signature, middle(last, name, blocks=2048))
    signature = op("aten.mean.default", [meta("float32", 2048)], [meta("float32")])  # of the losses per token
    yield Sample("reduction", signature, middle(last, "mean"))


def optimizer_ops(ddp: list[Kernel], mcore: list[Kernel]) -> Iterator[Sample]:
    """Full multi-tensor launches: 320 blocks of 65536 elements."""
    block = meta("float32", 320 * 65536)
    size = tensor_bytes(block)
    for kernels, leaf, operands, written in (
        (ddp, "_fused_adamw_", 4, 3),
        (ddp, "_foreach_mul_", 1, 1),
        (ddp, "_foreach_norm", 1, 0),
        (mcore, "_foreach_addcdiv_", 3, 1),
        (mcore, "_foreach_lerp_", 2, 1),
        (mcore, "_foreach_sqrt", 1, 1),
    ):
        signature = op(f"aten.{leaf}.default", [block] * operands, [], written=written * size, tensors=1)
        yield Sample("optimizer", signature, middle(kernels, leaf, blocks=320))


def data_movement(ddp: list[Kernel], fsdp: list[Kernel], mcore: list[Kernel]) -> Iterator[Sample]:
    for kernels, dtype, rows, calls in ((ddp, "float32", ROWS, 2), (mcore, "bfloat16", 2048, 16)):
        times = [k.duration_us for k in kernels if "embedding_dense_backward" in k.ops]  # the zero fill included
        inputs, weight = [meta(dtype, rows, HIDDEN), meta("int64", rows)], meta(dtype, VOCABULARY, HIDDEN)
        signature = op("aten.embedding_dense_backward.default", inputs, [weight])
        yield Sample("scatter", signature, sum(times) / calls, kernels=len(times) // calls)

    thirds, whole = meta("bfloat16", 2048, 16, 128), meta("bfloat16", 2048, 16, 384)
    yield Sample("concatenate", op("aten.cat.default", [thirds] * 3, [whole]), middle(mcore, "cat", "CatArray"))
    block = 12 * HIDDEN * HIDDEN // 2 + 4 * HIDDEN  # parameters of a block's tensor-parallel half
    root = (2 * VOCABULARY + 2048 + 2) * HIDDEN
    for parameters, blocks in ((block, 49168), (root, 270344)):
        signature = op("fsdp.chunk_cat.default", [meta("bfloat16", parameters)], [meta("float32", parameters)])
        yield Sample("concatenate", signature, middle(fsdp, "_chunk_cat", blocks=blocks))

    for kernels, dtype, blocks in (
        (ddp, "float32", 262144),
        (ddp, "float32", 65536),
        (fsdp, "bfloat16", 65536),
        (mcore, "bfloat16", 4096),
    ):
        filled = meta(dtype, blocks * 1024)
        signature = op("aten.fill_.Scalar", [filled], [filled], read=0)
        yield Sample("fill", signature, middle(kernels, "fill_", blocks=blocks))

    signature = op("copy_device_to_host", [meta("float32")], [meta("float32")])
    yield Sample("host_link", signature, middle(mcore, "_local_scalar_dense", "DtoH"))
    for bytes in (393840, 2163008):
        signature = op("copy_host_to_device", [meta("uint8", bytes)], [meta("uint8", bytes)])
        yield Sample("host_link", signature, middle(fsdp, "copy_", "HtoD", bytes=bytes))


def loops(path: Path) -> Iterator[Sample]:
    """Single kernels timed alone in a loop. Those under 15 us wait for the host; "embedding" has no shape, and the
    operands of "add_4096x8192" stay in the L2 cache."""
    times = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            times[row["kernel"]].append(float(row["base_us"]))
    for name, values in times.items():
        measured = median(values)
        shape = [int(n) for n in re.findall(r"\d+", name)]
        x = meta("bfloat16", *shape)
        if measured < 15:
            continue
        if name == "gemm_fp32_4096":
            yield Sample("gemm", product(4096, 4096, 4096, dtype="float32"), measured, "compute", label="loop")
        elif name.startswith("gemm_"):
            yield Sample("gemm", product(shape[0], shape[1], shape[2]), measured, "compute", label="loop")
        elif name.startswith("sdpa_"):
            yield Sample(
                "attention_forward",
                attention(shape[0], shape[1], shape[2], shape[3]),
                measured,
                "compute",
                label="loop",
            )
        elif name.startswith("layernorm_"):
            yield Sample("norm", op("aten.native_layer_norm.default", [x], [x]), measured, label="loop")
        elif name.startswith("softmax_"):
            yield Sample("softmax", op("aten._softmax.default", [x], [x]), measured, label="loop")
        elif name.startswith("gelu_"):
            yield Sample("activation", op("aten.gelu.default", [x], [x]), measured, label="loop")
        elif name == "axpy_fp32_128M":
            signature = pointwise("add.Tensor", "float32 float32", "float32", 128 * MI)
            yield Sample("elementwise", signature, measured, label="loop")
