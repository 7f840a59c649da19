"""The elements of tf.data pipelines, read so that an iterator ends at once, wherever it is dropped.

Two threads of TensorFlow can hold up the end of an iterator. The thread that tunes parallelism
misses its cancellation and sleeps on, for up to a minute. A thread that runs Python, such as a
conversion by Pillow, never returns once the interpreter shuts down, and the iterator waits for it
forever. So nothing is tuned, and every iterator ends before the interpreter does.
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Any

from vit_jax.data.host_tf import tf
from vit_jax.data.retries import raise_failed

# Of a map: the cores that this process may use, as far as the operating system says.
PARALLEL_CALLS = (
    len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
)

_open: weakref.WeakSet[Elements] = weakref.WeakSet()


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """`dataset` in its order, with the parallelism that each of its stages states."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.deterministic = True
    options.threading.max_intra_op_parallelism = 1
    return dataset.with_options(options)


class Elements:
    """An iterator over the elements of `dataset`, in NumPy.

    It owns TensorFlow's iterator, which ends with the last element, the first error, or this one.
    A read that has failed for good is raised at once, also where the data set ignores errors.
    """

    def __init__(self, dataset: tf.data.Dataset):
        self._iterator = untuned(dataset).as_numpy_iterator()
        _open.add(self)

    def __iter__(self) -> Elements:
        return self

    def __next__(self) -> Any:
        try:
            try:
                return next(self._iterator)
            finally:
                raise_failed()
        except BaseException as e:
            self.close()
            e.__context__ = None  # its frames and `e`'s would keep the iterator alive
            raise e.with_traceback(None) from None

    def close(self) -> None:
        """End; there are no more elements."""
        self._iterator = iter(())


@atexit.register
def _close_all() -> None:
    for elements in [*_open]:
        elements.close()
