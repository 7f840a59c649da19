"""Builds a compiled training step from a resolved config."""
