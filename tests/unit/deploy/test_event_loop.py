"""Ctrl-C while a command runs."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from deploy.event_loop import run_until_interrupted
from tests.support.waiting import LONG


def test_a_result_is_returned() -> None:
    assert run_until_interrupted(asyncio.sleep(0, "done")) == "done"


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


def test_another_cancellation_is_no_interrupt() -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run_until_interrupted(work())
