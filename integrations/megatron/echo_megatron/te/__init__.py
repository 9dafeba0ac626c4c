"""What stands in for Transformer Engine on a pretended device: the same modules, made of recorded operations."""
