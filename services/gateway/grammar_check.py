"""Checks grammars in a process of its own: `python -m spool.services.gateway.grammar_check FOLDER CPU_SECONDS`.

Each line of standard input is a JSON list of the kind, the text and the frame of a structure
(services/gateway/structure.py); each line of standard output is a JSON object with the grammar's `definition`, with an
`error`, with what of it is `too_costly`, or with how the check `failed`; and with the `cpu_seconds` that the check
took. The process ends with its standard input.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, grammar_from

from spool.engine.models.vocabulary import read_tokenizer
from spool.engine.sampling.grammars import GrammarError, GrammarTokens, check_grammar
from spool.services.gateway.schema_check import check_schemas
from spool.services.gateway.structure import JSON_OPTIONS

_MEMORY_BYTES = 256 << 20
"""For compiling one grammar, beyond what the tokens take. Two at a time fit into a pod of 3 GiB beside a gateway."""
_STACK_BYTES = 1 << 20
"""For compiling one grammar, in which the library recurses without a limit. Half of what the smallest of a worker's
threads has (2 MiB: Rust's, and glibc's where the system sets no limit), so that no grammar that passes here overflows
a worker's stack."""
_NICENESS = 10
"""Of the whole process, whose start takes longer than most checks: it gets a tenth of a core where a worker's thread
wants all of it, and a whole one where nobody does."""


def definition(kind: str, text: str, frame: str = "") -> str:
    """The grammar of a structure. Raises ValueError."""
    check_schemas(kind, text)
    if frame:
        check_schemas("lark", frame)
        content = definition(kind, text)
        grammar = json.loads(content)["grammars"][0] if content.startswith("{") else {"lark_grammar": content}
        return json.dumps({"grammars": [{"lark_grammar": frame}, {**grammar, "name": "content"}]})
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
    if kind == "lark":
        return LLMatcher.grammar_from_lark(text)
    if kind == "choice":
        texts = json.loads(text)
        if not texts:
            raise ValueError("there must be at least one choice")
        # One terminal: as rules of their own, thousands of choices would be too many for the library.
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(map(_quoted, texts))}")
    if kind not in ("regex", "grammar"):
        raise ValueError(f"{kind} is no kind of structure")
    return grammar_from("regex" if kind == "regex" else "grammar", text)


def _quoted(text: str) -> str:
    # Of the characters that JSON texts may hold as they are, one is none of Lark's.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def main() -> None:
    os.nice(_NICENESS)
    folder, cpu_seconds = Path(sys.argv[1]), float(sys.argv[2])
    tokenizer = read_tokenizer(folder)
    if tokenizer is None:
        raise SystemExit(f"{folder} holds no tokenizer.json")
    tokens: GrammarTokens | GrammarError
    try:
        tokens = GrammarTokens(tokenizer)
    except GrammarError as error:
        tokens = error
    for line in sys.stdin.buffer:
        sys.stdout.write(json.dumps(_answer(tokens, line, cpu_seconds)) + "\n")
        sys.stdout.flush()


def _answer(tokens: GrammarTokens | GrammarError, line: bytes, cpu_seconds: float) -> dict[str, Any]:
    """From a copy of this process that has the tokens already, and takes what it allocates with it when it ends."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            _limit(cpu_seconds)
            threading.stack_size(_STACK_BYTES)
            thread = threading.Thread(target=_write_answer, args=(tokens, line, writing))
            thread.start()
            thread.join()
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading, encoding="utf-8") as answer:
        text = answer.read()
    _, status, used = os.wait4(child, 0)
    answered = _read_answer(text, os.waitstatus_to_exitcode(status), cpu_seconds)
    return {**answered, "cpu_seconds": used.ru_utime + used.ru_stime}


def _read_answer(text: str, code: int, cpu_seconds: float) -> dict[str, str]:
    """Of a check that wrote `text` and ended with `code`."""
    if code == -signal.SIGPROF:
        return {"too_costly": f"it takes more than {cpu_seconds:g} s of CPU time to compile"}
    if code == -signal.SIGABRT:
        return {"too_costly": f"it takes more than {_MEMORY_BYTES >> 20} MiB of memory to compile"}
    if code in (-signal.SIGSEGV, -signal.SIGBUS):
        return {"too_costly": "it is nested too deeply"}
    if code < 0:
        return {"too_costly": f"its check was ended by {signal.Signals(-code).name}"}
    try:
        answered: dict[str, str] = json.loads(text)
    except ValueError:
        return {"failed": f"exit code {code}"}
    return answered


def _write_answer(tokens: GrammarTokens | GrammarError, line: bytes, writing: int) -> None:
    """Ends the process."""
    try:
        with open(writing, "w", encoding="utf-8") as answer:
            answer.write(json.dumps(_checked(tokens, line)))
        os._exit(0)
    except MemoryError:
        os.abort()
    finally:
        os._exit(1)


def _limit(cpu_seconds: float) -> None:
    """For this process from now on."""
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + _MEMORY_BYTES, used + _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)


def _checked(tokens: GrammarTokens | GrammarError, line: bytes) -> dict[str, str]:
    if isinstance(tokens, GrammarError):
        return {"error": str(tokens)}
    try:
        kind, text, frame = json.loads(line)
        if frame:
            # Whatever may come before the structure, only its own tokens are followed here.
            check_grammar(tokens, definition(kind, text))
        found = definition(kind, text, frame)
        check_grammar(tokens, found)
    except (GrammarError, ValueError) as error:
        return {"error": " ".join(str(error).split())}
    except MemoryError:
        raise
    except BaseException as error:  # a panic of the library is no Exception  # noqa: BLE001
        traceback.print_exc()
        return {"error": f"it could not be checked ({type(error).__name__})"}
    return {"definition": found}


if __name__ == "__main__":
    main()
