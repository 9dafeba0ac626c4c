"""Slowdown of kernels and communication that run together: features, data, training, prediction (docs/overlap.md)."""
