"""Slowdown of kernels and communication that run together: not built yet."""
