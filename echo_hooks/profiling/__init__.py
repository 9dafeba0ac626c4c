"""Measuring operations on a real device into a profile database."""
