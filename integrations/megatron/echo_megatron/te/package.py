"""Packages whose own names nobody asks for: ``transformer_engine`` and ``transformer_engine.common``."""
