"""Databases of measured operations, by accelerator, and the model learned from them (docs/timing.md)."""
