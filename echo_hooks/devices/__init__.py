"""Devices: the pretended CUDA device, its allocator, the tensors that live on it. Parts are imported by their names."""
