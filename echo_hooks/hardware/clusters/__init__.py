"""Presets of nodes and fabrics, one TOML file each, named after the accelerator in them; see ``..cluster``."""
