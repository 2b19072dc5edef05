"""Reasons for which an engine does not start; each message is one line that a user can act on."""

import re
import signal

from spool.scheduler.errors import SpoolError


class EngineError(SpoolError):
    """Base of all of them."""


class UnsupportedModelError(EngineError):
    """The model needs something that the paged engine does not do (chunked, sparse or linear attention ...)."""


class TokenizerError(EngineError, ValueError):
    """The folder holds no usable tokenizer; the message names the file."""


class UnsupportedProcessorError(EngineError):
    """The settings ask for an instruction set that this processor does not have."""


class GpuMemoryError(EngineError):
    """The workers of a GPU do not fit into its memory, or it cannot be known whether they do."""


class ExactModeUnavailableError(EngineError):
    """No set of shapes gives the same bits on this device."""


class DraftVocabularyError(EngineError):
    """The file that names the tokens of a draft's head does not hold what it must."""


class DeviceLostError(EngineError):
    """The device computes nothing more for this process, so the process has to end."""


_NO_MEMORY = re.compile("(?i)memoryerror|out of memory|unable to allocate|allocate memory|enough memory")


def with_remedy(reason: str) -> str:
    """Why a process did not start, with what to do about it where memory ran out."""
    if not _NO_MEMORY.search(reason) and not reason.startswith(f"killed by signal {signal.SIGKILL:d}"):
        return reason
    return (
        f"{reason} (if memory ran out: a smaller model, --quantization int4, fewer replicas or a smaller --kv-memory)"
    )


def one_line(error: BaseException) -> str:
    """The reason of an exception as one line; its type where it has no text."""
    return " ".join(str(error).split()) or type(error).__name__
