"""A LightningModule under its Trainer, over two nodes."""

import os

import lightning
import torch
from torch import nn


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128))

    def training_step(self, batch, _):
        (tokens,) = batch
        loss = nn.functional.cross_entropy(self.net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


data = torch.utils.data.TensorDataset(torch.randint(128, (4096, 33)))
local = int(os.environ["LOCAL_WORLD_SIZE"])
trainer = lightning.Trainer(
    accelerator="gpu",
    devices=local,
    num_nodes=int(os.environ["WORLD_SIZE"]) // local,
    strategy="ddp",
    max_steps=100,
    precision="bf16-mixed",
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=4))
