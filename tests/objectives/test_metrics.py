"""Metrics of training and of evaluators, our own and a plug-in's, against NumPy."""
