"""What an output must look like: from the fields of a request to a grammar that workers can follow.

A grammar is compiled before it is let in. Compiling can take minutes and gigabytes, and the library has no bound for
all of it, so that happens in processes of their own (services/gateway/grammar_check.py).
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Literal

from spool.scheduler.sampling import MAX_GRAMMAR_BYTES
from spool.services.gateway.errors import ErrorKind, RequestError, invalid
from spool.services.gateway.turns import KeyTurns, TooManyWaitError
from spool.services.observability.request_ids import current_account

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

CPU_SECONDS = 0.5
"""For compiling one grammar. Workers compile what the gateway lets in, in a step that others share."""

TOO_COSTLY = "structure_too_costly"
"""Code of the error for a grammar that takes too much of something."""

# So many grammars are checked at once, and a hostile one takes `CPU_SECONDS`.
_PROCESSES = 2

MAX_WAITING = 32
"""Grammars of one API key that may wait to be checked."""

# Grammars that were let in lately need no check.
_REMEMBERED = 256

JSON_WHITE_SPACE = r"[ \t\r\n]{0,32}"
"""Between two tokens of JSON. Without a bound a small model may go on with white space until its tokens run out."""

JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_pattern": JSON_WHITE_SPACE,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
    # Without "u": an escaped letter would give a property's name a second form, which the property's schema misses.
    "json_allowed_escapes": 'nrbtf\\"',
    "json_allow_general_unicode_escapes": False,
}
"""Of the library (`x-guidance`); a schema's own are not used."""

ANY_JSON_OBJECT = '{"type": "object"}'


@dataclass(frozen=True, slots=True)
class Structure:
    """`text` is a JSON schema, a regular expression, a JSON list of texts, a grammar in Lark's form or in GBNF, or one
    that is in Lark's form for certain. `param` is the request's field that asks for it. `parts` are structures within
    it: an error that is one's own names its field. `frame` is a grammar in Lark's form around the structure, which it
    calls `@content`."""

    kind: Literal["json_schema", "regex", "choice", "grammar", "lark"]
    text: str
    param: str
    parts: tuple[Structure, ...] = ()
    frame: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.kind, self.text, self.frame


class GrammarChecks:
    """Checks the structures that requests ask for, against the tokenizer of a model's folder.

    API keys take turns: however many checks one key asks for, another key's waits for those under way alone. A key
    whose check fails rests then.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._threads = ThreadPoolExecutor(_PROCESSES, thread_name_prefix="grammar-checks")
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        self._turns = KeyTurns(_PROCESSES, _PROCESSES, MAX_WAITING)
        self._known: OrderedDict[tuple[str, str, str], str] = OrderedDict()
        self._pending: dict[tuple[str, tuple[str, str, str]], asyncio.Task[str]] = {}
        """Checks that wait or run, by the key that asked."""
        weakref.finalize(self, _end, self._idle)

    async def definition(self, structure: Structure) -> str:
        """The grammar of a structure, for workers. Raises RequestError with the reason, naming the field."""
        size = len(structure.text.encode())
        if size > MAX_GRAMMAR_BYTES:
            message = f"{structure.param} has {size} bytes, must have at most {MAX_GRAMMAR_BYTES}"
            raise invalid(message, structure.param)
        key = structure.key
        if key not in self._known:
            try:
                self._known[key] = await asyncio.shield(self._check(structure, current_account()))
            except RequestError as error:
                # The parts of a structure that takes too long may take much longer in all.
                if error.kind is ErrorKind.INVALID and error.code != TOO_COSTLY:
                    for part in structure.parts:
                        await self.definition(part)
                raise
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]

    def _check(self, structure: Structure, account: str) -> asyncio.Task[str]:
        """One for all requests of a key that ask for the same at a time. It goes on when nobody waits for it any more:
        then it takes a turn of its key's all the same."""
        name = account, structure.key
        check = self._pending.get(name)
        if check is None:
            check = self._pending[name] = asyncio.create_task(self._check_in_turn(structure, account))
            check.add_done_callback(lambda ended: self._ended(name, ended))
        return check

    def _ended(self, name: tuple[str, tuple[str, str, str]], check: asyncio.Task[str]) -> None:
        del self._pending[name]
        if not check.cancelled():
            check.exception()  # whoever still waits gets it

    async def _check_in_turn(self, structure: Structure, account: str) -> str:
        try:
            async with self._turns.place(account):
                loop = asyncio.get_running_loop()
                answer = await loop.run_in_executor(self._threads, self._answer, structure)
                if "definition" not in answer:
                    self._turns.rest_after_failure(account, answer["cpu_seconds"])
        except TooManyWaitError:
            message = f"{MAX_WAITING} constraints of this API key wait to be checked, no more may"
            raise RequestError(
                ErrorKind.KEY_LIMIT, message, param=structure.param, code="rate_limit_exceeded"
            ) from None
        return _definition(structure, answer)

    def _answer(self, structure: Structure) -> dict[str, Any]:
        """As services/gateway/grammar_check.py writes it."""
        process = self._process()
        answer = self._ask(process, structure)
        if answer is None:
            return {"failed": f"exit code {process.wait()}", "cpu_seconds": 0.0}
        self._idle.put(process)
        return answer

    def _process(self) -> subprocess.Popen[bytes]:
        """One that is idle, or a new one."""
        while True:
            try:
                process = self._idle.get_nowait()
            except Empty:
                command = [sys.executable, "-P", "-m", "spool.services.gateway.grammar_check", str(self._folder)]
                command.append(str(CPU_SECONDS))
                # Ctrl-C is for the gateway, whose end is theirs.
                return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
            if process.poll() is None:
                return process

    def _ask(self, process: subprocess.Popen[bytes], structure: Structure) -> dict[str, Any] | None:
        """None where the process ended."""
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the process was started without pipes")
        try:
            process.stdin.write(json.dumps(structure.key).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return None
        line = process.stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else None


def _definition(structure: Structure, answer: dict[str, Any]) -> str:
    """Of a check's answer. Raises RequestError."""
    if "failed" in answer:
        message = f"the check of {structure.param} ended with {answer['failed']}"
        raise RequestError(ErrorKind.FAILED, message, param=structure.param, code="internal")
    for refused, code in (("too_costly", TOO_COSTLY), ("error", None)):
        if refused in answer:
            raise invalid(f"{structure.param} cannot be used: {answer[refused]}", structure.param, code)
    definition: str = answer["definition"]
    if len(definition) > MAX_GRAMMAR_BYTES:
        limit = f"at most {MAX_GRAMMAR_BYTES}"
        raise invalid(f"{structure.param} gives a grammar of {len(definition)} bytes, {limit}", structure.param)
    return definition


def _end(processes: SimpleQueue[subprocess.Popen[bytes]]) -> None:
    while not processes.empty():
        process = processes.get_nowait()
        process.kill()
        process.communicate()
