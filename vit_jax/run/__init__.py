"""A training run: the checks before it, the loop, and the errors that end it."""
