"""Presets: one TOML file per accelerator, each number with its source."""
