"""Measuring kernels and communication that run together: the one part of the room that needs torch and devices."""
