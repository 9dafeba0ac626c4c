"""A data loader with workers and pinned memory, gradient accumulation without synchronisation, clipping, a schedule."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

MICRO_BATCHES, BATCH = 4, 2


class Numbers(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        mask = torch.ones(600, 600).tril()  # above the size from which tensors of the main process hold no data
        return torch.randn(64, generator=generator), index % 10, mask


def main():
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    data = Numbers()
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, BATCH, sampler=sampler, num_workers=2, pin_memory=True, persistent_workers=True)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(128, 10)
    )
    model = DistributedDataParallel(model.to(device), device_ids=[device.index])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    step = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for i, (inputs, labels, _mask) in enumerate(loader):
            inputs, labels = inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            if (i + 1) % MICRO_BATCHES:
                with model.no_sync():
                    (criterion(model(inputs), labels) / MICRO_BATCHES).backward()
                continue
            loss = criterion(model(inputs), labels) / MICRO_BATCHES
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            if dist.get_rank() == 0:
                print(f"step {step} loss {loss.item():.3f} norm {norm.item():.3f} lr {schedule.get_last_lr()[0]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
