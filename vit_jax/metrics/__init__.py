"""Metrics of a run: writers, the line on the terminal, the speed.

Metrics are flat: {"train/loss": 2.3}. Those that depend on the clock are named `time/...`; all
others are the same in every run of one config, one mesh and one build.
"""

from vit_jax.metrics.profiler import Profiler
from vit_jax.metrics.terminal import CONSOLE, Progress, log_to_console, readable
from vit_jax.metrics.throughput import Throughput
from vit_jax.metrics.weights_and_biases import check_installed
from vit_jax.metrics.writers import MetricWriter, NullWriter, finite_or_none, values_at

__all__ = [
    "CONSOLE",
    "MetricWriter",
    "NullWriter",
    "Profiler",
    "Progress",
    "Throughput",
    "check_installed",
    "finite_or_none",
    "log_to_console",
    "readable",
    "values_at",
]
