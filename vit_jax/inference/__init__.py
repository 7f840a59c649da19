"""A trained model at work: evaluation and prediction."""
