"""A stand-in for a collective on one GPU: a kernel of so many blocks that moves memory as the steps of a ring do.

Each block is one channel. Piece by piece it reads its share of the input and of a small buffer (what a neighbour would
have sent), adds them and writes the sum, and then waits until the piece is due: the links of the real thread of
transfers, which do not exist here, are a pace. It cannot show what waiting for a neighbour's flags over the links
costs, so how far it may be trusted is a matter of measurement (docs/overlap.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

THREADS = 544
"""Threads of a block: NCCL's collectives launch 544 (16 warps that work and one that synchronises) or 640 on Hopper."""

SHARED_BYTES = 80 << 10
"""Shared memory of a block, so that no block of a large kernel fits beside it, as with NCCL's own."""

PIECE_BYTES = 32 << 10
BUFFER_BYTES = 1 << 20  # per channel

_SOURCE = r"""
extern "C" __global__ void ring_step(
    const float4* input, float4* buffer, float4* output, int share, int piece, int slots, double nanoseconds)
{
    extern __shared__ float4 occupied[];
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    const long long first = (long long)blockIdx.x * share;
    float4* mine = buffer + (long long)blockIdx.x * slots;
    double due = 0.0;
    for (int done = 0; done < share; done += piece) {
        for (int i = done + threadIdx.x; i < done + piece && i < share; i += blockDim.x) {
            float4 a = input[first + i], b = mine[i % slots];
            a.x += b.x; a.y += b.y; a.z += b.z; a.w += b.w;
            output[first + i] = a;
        }
        due += nanoseconds;
        do {
            asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        } while ((double)(now - begin) < due);
        __syncthreads();
    }
    if (share < 0) output[threadIdx.x] = occupied[threadIdx.x];
}
"""


@dataclass(frozen=True)
class Traffic:
    """What the stand-in does: ``channels`` blocks move ``bytes`` (each read twice and written once) in at least
    ``duration_us``."""

    channels: int
    bytes: int
    duration_us: float


class StandIn:
    """The compiled kernel and its memory, for transfers of up to ``most_bytes``."""

    def __init__(self, device: torch.device, most_bytes: int, most_channels: int):
        options = {"compute_capability": None}
        self._kernel = torch.cuda._compile_kernel(_SOURCE, "ring_step", **options)
        self._kernel.set_shared_memory_config(SHARED_BYTES)
        count = most_bytes // 4
        self._input = torch.randn(count, device=device)
        self._output = torch.empty(count, device=device)
        self._buffer = torch.randn(most_channels * BUFFER_BYTES // 4, device=device)

    def call(self, traffic: Traffic) -> Callable[[], None]:
        """A call that launches it on the current stream."""
        share = traffic.bytes // 16 // traffic.channels
        piece = max(min(PIECE_BYTES // 16, share), 1)
        pieces = -(-share // piece)
        pace = 1e3 * traffic.duration_us / pieces
        arguments = [self._input, self._buffer, self._output, share, piece, BUFFER_BYTES // 16, float(pace)]

        def launch() -> None:
            self._kernel(grid=(traffic.channels, 1, 1), block=(THREADS, 1, 1), args=arguments, shared_mem=SHARED_BYTES)

        return launch
