"""Objectives: what is minimised over a batch. One file and one line in OBJECTIVES each."""

from vit_jax.objectives.supervised import make_supervised

OBJECTIVES = {"supervised": make_supervised}
