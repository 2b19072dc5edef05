"""Ctrl-C while a command runs."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from deploy.event_loop import run_until_interrupted
from tests.support.waiting import LONG


def test_an_interrupt_lets_the_command_clean_up_first() -> None:
    ended = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(LONG)
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_until_interrupted(work())
    assert ended == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
