"""Checks grammars in a process of its own: `python -m services.gateway.grammar_check FOLDER CPU_SECONDS`.

Each line of standard input is a JSON list of the kind, the text and the frame of a structure
(services/gateway/structure.py); each line of standard output is a JSON object with the grammar's `definition`, or with
an `error`. A grammar that takes more CPU time ends the process by SIGPROF, one that takes more memory by SIGABRT. The
process ends with its standard input.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from pathlib import Path

from llguidance import LLMatcher, grammar_from

from engine.models.vocabulary import read_tokenizer
from engine.sampling.grammars import GrammarError, GrammarTokens, check_grammar
from services.gateway.schema_check import check_schemas
from services.gateway.structure import JSON_OPTIONS

_MEMORY_BYTES = 4 << 30


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
    folder, cpu_seconds = Path(sys.argv[1]), float(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    tokenizer = read_tokenizer(folder)
    if tokenizer is None:
        raise SystemExit(f"{folder} holds no tokenizer.json")
    tokens: GrammarTokens | None = None
    for line in sys.stdin.buffer:
        try:
            tokens = tokens or GrammarTokens(tokenizer)
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
            kind, text, frame = json.loads(line)
            if frame:
                # Whatever may come before the structure, only its own tokens are followed here.
                check_grammar(tokens, definition(kind, text))
            found = definition(kind, text, frame)
            check_grammar(tokens, found)
            answer = {"definition": found}
        except (GrammarError, ValueError) as error:
            answer = {"error": " ".join(str(error).split())}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
