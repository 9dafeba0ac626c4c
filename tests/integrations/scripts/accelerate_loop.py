"""A plain loop under accelerate."""

import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
model = nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randint(128, (4096, 33)))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (tokens,) in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    average = accelerator.gather(loss.detach()[None]).mean()
