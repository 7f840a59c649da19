"""What the command `benchmark` measures or draws: input, the training step, augmentation."""
