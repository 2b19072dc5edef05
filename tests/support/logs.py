"""Our own loggers, put back as they were."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from spool.services.observability.logs import PACKAGES


@contextmanager
def restored_loggers() -> Iterator[None]:
    loggers = [logging.getLogger(package) for package in PACKAGES]
    before = [(logger, logger.handlers, logger.level, logger.propagate) for logger in loggers]
    try:
        yield
    finally:
        for logger, handlers, level, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
