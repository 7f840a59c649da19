"""Metrics of a run: writers, the progress line on the terminal, speed.

Metrics are flat: {"train/loss": 2.3}. Metrics that depend on the clock are named `time/...`; all
others are the same in every run with the same config, mesh and build.
"""

from vit_jax.metrics.profiler import Profiler
from vit_jax.metrics.terminal import CONSOLE, Progress, is_accuracy, log_to_console, readable
from vit_jax.metrics.throughput import Throughput
from vit_jax.metrics.weights_and_biases import check_installed
from vit_jax.metrics.writers import (
    MetricWriter,
    NullWriter,
    finite_or_none,
    read_history,
    values_at,
    values_of,
)

__all__ = [
    "CONSOLE",
    "MetricWriter",
    "NullWriter",
    "Profiler",
    "Progress",
    "Throughput",
    "check_installed",
    "finite_or_none",
    "is_accuracy",
    "log_to_console",
    "read_history",
    "readable",
    "values_at",
    "values_of",
]
