"""Runs `python -m vit_jax.main ARGS` and kills it with SIGKILL at a chosen moment.

python killed_run.py MOMENT ARGS...; MOMENT is one of

  startup      before the first state exists
  evaluation:N in the N-th evaluation, after its last batch
  stopped:N    after a request to stop at step N, in the evaluation that follows the save
  rows:N       halfway through the N-th row of metrics.jsonl
  events:N     halfway through the N-th TensorBoard event of training
  save:N       during the N-th save, when its files are written but not committed and training
               has continued
  files:N      before `label` or `predict` writes its N-th file: the manifest, the parts, ...
"""

import os
import signal
import sys
import threading

from vit_jax.base import files
from vit_jax.checkpoints import checkpoint
from vit_jax.main import main
from vit_jax.run import loop, record, train
from vit_jax.run.watch import speed


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def after(count, function, then):
    """Wrap `function`: from the `count`-th call on, call `then(function, *args)` instead."""
    calls = 0

    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        return then(function, *args, **kwargs) if calls >= count else function(*args, **kwargs)

    return wrapped


def kill_after(function, *args, **kwargs):
    function(*args, **kwargs)
    kill()


def arm(moment):
    kind, _, number = moment.partition(":")
    count = int(number or 1)
    if kind == "startup":
        train.start_state = lambda run: kill()
    elif kind == "evaluation":
        record.evaluate = after(count, record.evaluate, kill_after)
    elif kind == "stopped":
        loop.PreemptionGuard.should_stop = lambda self, step: step == count
        record.evaluate = after(1, record.evaluate, kill_after)
    elif kind in ("rows", "events"):
        owner, write, seen = files.LocalFile, files.LocalFile.write, []

        def write_half(self, content):
            is_row = content.startswith(b'{"step"') and content.count(b"\n") == 1
            is_event = not content.startswith(b"{") and b"train/loss" in content
            seen.extend([content] * {"rows": is_row, "events": is_event}[kind])
            if len(seen) < count:
                return write(self, content)
            write(self, content[: len(content) // 2])
            kill()

        owner.write = write_half
    elif kind == "save":
        owner, went_on = checkpoint.Checkpoints, threading.Event()
        before, save = speed.Profiler.before, owner.save

        def save_and_note(self, *args):
            save(self, *args)
            went_on.clear()

        def hold(function, self):
            assert went_on.wait(timeout=60), "no step was dispatched while the save was held"
            kill()

        def note(self, step):
            went_on.set()
            before(self, step)

        speed.Profiler.before, owner.save = note, save_and_note
        owner._seal_uncommitted = after(count, owner._seal_uncommitted, hold)
    elif kind == "files":
        files.open_for_append = after(count, files.open_for_append, lambda *_: kill())
    else:
        raise ValueError(moment)


if __name__ == "__main__":
    arm(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
