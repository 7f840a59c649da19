"""A training run: all that is checked before it, the loop, and what ends it."""
