"""Accelerators and clusters: what a device and a network can do, every number with its source."""
