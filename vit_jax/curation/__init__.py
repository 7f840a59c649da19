"""Sets of pictures, prepared for training."""
