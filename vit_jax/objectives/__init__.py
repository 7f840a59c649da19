"""Objectives: what is minimised over a batch. One file and one line in OBJECTIVES each."""

from collections.abc import Callable

import flax.linen as nn

from vit_jax.objectives.supervised import Loss, Objective, make_supervised

OBJECTIVES: dict[str, Callable[[nn.Module, Loss], Objective]] = {"supervised": make_supervised}
