"""Objectives: what is minimised over a batch. One file each, and a line in config/registries.py."""
