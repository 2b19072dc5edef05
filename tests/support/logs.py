"""Our own logger, put back as it was."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from spool.services.observability.logs import LOGGER


@contextmanager
def restored_logger() -> Iterator[None]:
    logger = logging.getLogger(LOGGER)
    before, level, propagate = logger.handlers, logger.level, logger.propagate
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before, propagate
        logger.setLevel(level)
