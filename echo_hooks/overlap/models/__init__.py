"""Slowdown models that come with Echo, by accelerator."""
