"""DeepSpeed with its three batch sizes given: they fit a world of 2 only."""

import deepspeed
import torch

model = torch.nn.Linear(16, 16)
config = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
for _ in range(100):
    engine.backward(engine(torch.ones(4, 16, device=engine.device)).sum())
    engine.step()
