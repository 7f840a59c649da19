"""Values that are dear to read, kept up to a size."""

from __future__ import annotations

import concurrent.futures
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any


class Kept:
    """Values that are dear to read: the last used ones stay, together at most `most` in size.

    A value that several threads want at once is read once.
    """

    def __init__(self, most: int):
        self._most, self._lock = most, threading.Lock()
        self._values: OrderedDict[Hashable, tuple[concurrent.futures.Future, int]] = OrderedDict()
        self._size = 0

    def get(self, key: Hashable, read: Callable[[], Any], size: int) -> Any:
        """The value of `key`, which `read` gives; an error of `read` is not kept."""
        with self._lock:
            if is_new := key not in self._values:
                self._values[key] = concurrent.futures.Future(), size
                self._size += size
            self._values.move_to_end(key)
            found, _ = self._values[key]
            while self._size > self._most and len(self._values) > 1:
                self._size -= self._values.popitem(last=False)[1][1]
        if is_new:
            try:
                found.set_result(read())
            except Exception as e:
                with self._lock:
                    if self._values.pop(key, None):
                        self._size -= size
                found.set_exception(e)
        return found.result()
