"""What the command `benchmark` measures: the input pipeline and the training step."""
