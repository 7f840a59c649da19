"""Sets of pictures: prepared for training, looked at, without duplicates, balanced."""
