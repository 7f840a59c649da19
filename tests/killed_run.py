"""Runs `python -m vit_jax.main ARGS`, and kills it with SIGKILL at a chosen moment.

python killed_run.py MOMENT ARGS...; MOMENT is one of

  startup      before the first state exists
  step:N       before the step numbered N is dispatched
  evaluation:N in the N-th evaluation, once it has run over its batches
  rows:N       in the N-th row, which is written by half
  save:N       while the N-th save is held in flight: its files are written and not committed,
               and training goes on
"""

import os
import signal
import sys
import time

from vit_jax import checkpoint, metrics, train
from vit_jax.evaluators import classification
from vit_jax.main import main


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def after(count, function, then):
    """`function`, but from its `count`-th call on `then(function, *args)` is called instead."""
    calls = 0

    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        return then(function, *args, **kwargs) if calls >= count else function(*args, **kwargs)

    return wrapped


def kill_after(function, *args, **kwargs):
    function(*args, **kwargs)
    kill()


def write_half(function, file, content):
    function(file, content[: len(content) // 2])
    file.flush()
    kill()


def arm(moment):
    kind, _, number = moment.partition(":")
    count = int(number or 1)
    if kind == "startup":
        train.start_state = lambda run: kill()
    elif kind == "step":
        before = train.Profiler.before
        train.Profiler.before = lambda self, step: kill() if step == count else before(self, step)
    elif kind == "evaluation":
        owner = classification.Classification
        owner.run = after(count, owner.run, kill_after)
    elif kind == "rows":
        owner = metrics._LocalFile
        owner.write = after(count, owner.write, write_half)
    elif kind == "save":
        owner = checkpoint.Checkpoints

        def hold(function, self):
            time.sleep(0.3)
            kill()

        owner._seal_uncommitted = after(count, owner._seal_uncommitted, hold)
    else:
        raise ValueError(moment)


if __name__ == "__main__":
    arm(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
