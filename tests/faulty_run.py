"""Runs `python -m vit_jax.main ARGS` with a fault in this process.

python faulty_run.py FAULT ARGS...; FAULT is one of

  loader:N     the batch of step N never comes
  slow:S       compilation and every evaluation take S seconds longer (not a fault)
  slow_exit:S  a job that ends at once waits S seconds in this process (not a fault)
  code         the digest of the package's code differs
  program      the lowered step differs
"""

import logging
import sys
import time

from vit_jax.main import execute_and_exit
from vit_jax.run import build, loop, record
from vit_jax.run.setup import agreement as comparison


def before(function, then):
    """Wrap `function` so that `then` is called first."""

    def wrapped(*args, **kwargs):
        then()
        return function(*args, **kwargs)

    return wrapped


def arm(fault):
    kind, _, number = fault.partition(":")
    if kind == "loader":
        batches = build.data.train_batches

        def stuck(*args, steps, **kwargs):
            for step, batch in enumerate(batches(*args, steps=steps, **kwargs), steps.start + 1):
                if step == int(number):
                    time.sleep(1e6)
                yield batch

        build.data.train_batches = stuck
    elif kind == "slow":
        seconds = float(number)
        record.evaluate = before(record.evaluate, lambda: time.sleep(seconds))
        loop.flops.expected_memory = before(loop.flops.expected_memory, lambda: time.sleep(seconds))
    elif kind == "slow_exit":
        seconds = float(number)
        logging.shutdown = before(logging.shutdown, lambda: time.sleep(seconds))
    elif kind == "code":
        software = comparison.software
        comparison.software = lambda: software() | {"code of vit_jax": "other"}
    elif kind == "program":
        compare = loop.compare
        loop.compare = lambda config, what, find: compare(config, what, lambda: {what: "another"})
    else:
        raise ValueError(fault)


if __name__ == "__main__":
    arm(sys.argv[1])
    execute_and_exit(sys.argv[2:])
