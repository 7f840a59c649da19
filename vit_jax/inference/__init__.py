"""Evaluation and prediction with trained models."""
