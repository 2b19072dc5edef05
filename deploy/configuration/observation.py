"""What replicas say about what they do."""

from __future__ import annotations

import logging
from enum import Enum

from deploy.configuration.section import Section, described
from services.log_format import LogFormat


class LogLevel(Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def number(self) -> int:
        return int(logging.getLevelNamesMapping()[self.name])


class LoggingSettings(Section):
    """What replicas write to their standard error, which Ray keeps in its log folder."""

    format: LogFormat = described(LogFormat.TEXT, "`text`, or `json` for one object a line.")
    level: LogLevel = described(LogLevel.INFO, "The least important lines to write; `debug` has two for each sequence.")
