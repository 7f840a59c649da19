"""Silence loggers for a while."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet(*names: str, below: int = logging.CRITICAL) -> Iterator[None]:
    """Log no message under the level `below` of the loggers with these names."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(below)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
