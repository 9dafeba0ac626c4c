"""The names of ``transformer_engine.pytorch``."""
# ruff: noqa: F401

