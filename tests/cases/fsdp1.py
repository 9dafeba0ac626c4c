"""FullyShardedDataParallel, the class, with a wrapping policy, mixed precision and a sharded clip of the norm."""

import functools
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
block = functools.partial(torch.nn.TransformerEncoderLayer, 64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
model = torch.nn.Sequential(torch.nn.Embedding(100, 64), *(block() for _ in range(3)), torch.nn.Linear(64, 100))
model = FullyShardedDataParallel(
    model,
    auto_wrap_policy=ModuleWrapPolicy({torch.nn.TransformerEncoderLayer}),
    mixed_precision=MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16),
    sharding_strategy=ShardingStrategy.FULL_SHARD,
    device_id=device,
    use_orig_params=True,
    limit_all_gathers=True,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(10):
    tokens = torch.randint(100, (2, 17), device=device)
    loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
