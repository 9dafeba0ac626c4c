"""What a process takes of a GPU outside PyTorch's allocator: context, libraries, communicators, one after the other.

    torchrun --nproc-per-node 2 bench/gpu/device_memory.py [--out bench/results/device_memory_h200.json]
    NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=ALLOC,INIT torchrun ...     # NCCL's own account of its buffers

Used memory of the device less what the allocator has reserved, in MiB, of rank 0; on a device that nobody else uses.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rank, device = int(os.environ["RANK"]), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    found: dict[str, int] = {}

    def note(what: str) -> None:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        found[what] = round((total - free - torch.cuda.memory_reserved()) / 2**20)
        if rank == 0:
            print(f"{what:24} {found[what]:6} MiB", flush=True)

    small, large = torch.zeros(1, device=device), torch.zeros(1 << 28, device=device)
    note("context")
    dist.init_process_group("nccl", device_id=device)
    note("communicator")
    dist.all_reduce(small)
    note("small all-reduce")
    dist.all_reduce(large)
    note("1 GiB all-reduce")
    dist.all_to_all_single(torch.empty_like(large), large)
    note("all-to-all")
    dist.send(large, 1 - rank) if rank == 0 else dist.recv(large, 0)
    note("send and recv")
    dist.all_reduce(large, group=dist.new_group([0, 1]))
    note("another group's all-reduce")
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    a @ a
    note("matrix product")
    q = torch.randn(4, 16, 2048, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
    torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    note("attention")
    if options.out and rank == 0:
        versions = {"torch": torch.__version__, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        result = {"command": "torchrun --nproc-per-node 2 bench/gpu/device_memory.py", "versions": versions}
        result |= {"device": torch.cuda.get_device_name(), "outside_allocator_mib": found}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
