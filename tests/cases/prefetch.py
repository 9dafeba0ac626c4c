"""Batches copied on a stream of their own while the model runs, with events and record_stream."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)


class Prefetcher:
    def __init__(self, batches):
        self.batches = iter(batches)
        self.stream = torch.cuda.Stream()
        self.load()

    def load(self):
        self.next = next(self.batches, None)
        if self.next is None:
            return
        with torch.cuda.stream(self.stream):
            self.next = self.next.cuda(non_blocking=True).float().div_(255)

    def __iter__(self):
        while self.next is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            batch = self.next
            batch.record_stream(torch.cuda.current_stream())
            self.load()
            yield batch


model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 3, padding=1, bias=False),
    torch.nn.BatchNorm2d(16),
    torch.nn.ReLU(inplace=True),
    torch.nn.MaxPool2d(2),
    torch.nn.Conv2d(16, 32, 3, padding=1),
    torch.nn.BatchNorm2d(32),
    torch.nn.ReLU(inplace=True),
    torch.nn.AdaptiveAvgPool2d(1),
    torch.nn.Flatten(),
    torch.nn.Linear(32, 10),
)
model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).to(device, memory_format=torch.channels_last)
model = DistributedDataParallel(model, device_ids=[device.index])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
batches = [torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8).pin_memory() for _ in range(10)]
correct = torch.zeros((), device=device)
for images in Prefetcher(batches):
    begin.record()
    labels = torch.randint(10, (len(images),), device=device)
    logits = model(images.contiguous(memory_format=torch.channels_last))
    loss = torch.nn.functional.cross_entropy(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    correct += (logits.argmax(1) == labels).sum()
    end.record()
    end.synchronize()
    print(f"loss {loss.item():.3f} in {begin.elapsed_time(end):.2f} ms, accuracy {correct.item() / len(images):.2f}")
