"""The names of ``transformer_engine.pytorch``."""

