"""Benchmarks of the command `benchmark`: input pipeline, training step, augmentation sheet."""
