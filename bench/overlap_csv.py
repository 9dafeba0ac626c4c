"""Pairs measured elsewhere (kernel, collective, base_us, overlap_us, ...) as a file that `echo-sim overlap` reads.

    python bench/overlap_csv.py MEASURED.csv --accelerator h200-sxm -o bench/results/overlap/h200-sxm_loops.parquet

Kernels are known by their names: gemm_MxKxN (bfloat16, or gemm_fp32_N), sdpa_BxHxSxD (causal), layernorm, gelu,
softmax and add of ROWSxCOLUMNS (add reads one such tensor: its time leaves room for no more), axpy_fp32_128M. Of a
collective only the kernel's side is taken: its own time is a mean over a loop that went on after the kernels'.
"""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path

from echo_hooks.graph.ops import OpSignature, TensorMeta
from echo_hooks.hardware.units import parse_quantity
from echo_hooks.overlap.samples import Launch, Sample, write_samples

SIZE = {"bfloat16": 2, "float32": 4}
CHANNELS = {"exchange": 32}  # of 512 MiB; the others take 24 (two H200, NCCL 2.28.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--accelerator", required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    samples, dropped, unknown = [], 0, set()
    with options.measured.open(newline="") as file:
        for row in csv.DictReader(file):
            signature = signature_of(row["kernel"])
            if signature is None:
                unknown.add(row["kernel"])
            elif row["covered"] != "1":
                dropped += 1
            else:
                samples.append(sample(row, signature, options.accelerator))
    about = {"source": options.measured.name, "not_covered": dropped, "unknown": sorted(unknown)}
    write_samples(options.output, samples, about)
    print(f"{len(samples)} samples, {dropped} not covered, unknown kernels: {', '.join(sorted(unknown)) or 'none'}")


def sample(row: dict[str, str], signature: OpSignature, accelerator: str) -> Sample:
    call, size = row["collective"].rsplit("_", 1)
    return Sample(
        kernel=name_of(row["kernel"]),
        signature=signature,
        launch=Launch(),
        call=call,
        bytes=int(parse_quantity(size, "bytes")),
        dtype="bfloat16",
        ranks=int(row["ranks"]),
        ranks_per_node=int(row["ranks"]),
        rank=int(row["rank"]),
        repeat=0,
        base_us=float(row["base_us"]),
        overlap_us=float(row["overlap_us"]),
        call_base_us=float(row["coll_base_us"]),
        call_overlap_us=math.nan,
        channels=CHANNELS.get(call, 24),
        accelerator=accelerator,
        source="loops",
    )


def name_of(name: str) -> str:
    """As `echo-sim overlap collect` calls the same kernel, so that both are held out together."""
    kind, _, shape = name.partition("_")
    if kind == "gemm" and "x" in shape:
        m, k, n = shape.split("x")
        return f"gemm_{m}x{n}x{k}"
    return f"scale_{shape}" if kind == "add" else name


def signature_of(name: str) -> OpSignature | None:
    kind, _, shape = name.partition("_")
    if kind == "gemm":
        dtype = "float32" if shape.startswith("fp32") else "bfloat16"
        edges = [int(n) for n in shape.removeprefix("fp32_").split("x")]
        m, k, n = edges if len(edges) == 3 else edges * 3
        return made("aten.mm.default", [(m, k), (k, n)], [(m, n)], dtype, 2 * m * k * n, tf32=False)
    if kind == "sdpa":
        b, h, s, d = (int(n) for n in shape.split("x"))
        flops = 4 * b * h * s * s * d
        name = "aten._scaled_dot_product_cudnn_attention.default"
        return made(name, [(b, h, s, d)] * 3, [(b, h, s, d)], "bfloat16", flops, causal=True)
    if kind == "axpy":
        return made("aten.add.Tensor", [(1 << 27,)] * 2, [(1 << 27,)], "float32")
    names = {"layernorm": "native_layer_norm.default", "gelu": "gelu.default", "softmax": "_softmax.default",
             "add": "add.Tensor"}  # fmt: skip
    if kind in names:
        rows = tuple(int(n) for n in shape.split("x"))
        return made(f"aten.{names[kind]}", [rows], [rows], "bfloat16")
    return None


def made(name: str, inputs: list, outputs: list, dtype: str, flops: int = 0, **attrs) -> OpSignature:
    sides = [tuple(TensorMeta(shape, dtype) for shape in side) for side in (inputs, outputs)]
    read, written = (sum(math.prod(t.shape) * SIZE[dtype] for t in side) for side in sides)
    return OpSignature(name, sides[0], sides[1], flops, read, written, tuple(attrs.items()))


if __name__ == "__main__":
    main()
