"""The end of a process that cannot go on."""

from __future__ import annotations

import logging
import os
from typing import NoReturn

logger = logging.getLogger(__name__)


def end_process(reason: str) -> NoReturn:
    """Ends this process at once, without waiting for its threads. Whoever runs it starts it again."""
    logger.error("the worker ends: %s", reason)
    logging.shutdown()
    os._exit(1)
