"""Calibrations that come with accelerator presets, one TOML file each; bench/fit_calibrations.py makes them."""
