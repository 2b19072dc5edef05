"""The process that checks grammars: what one takes of memory has a limit, and harms no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.gateway import save_tokenizer


def test_a_grammar_that_takes_too_much_memory_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    large, small = json.dumps(["x" * 3_000_000]), json.dumps(["yes", "no"])
    asked = "".join(json.dumps(["choice", text, ""]) + "\n" for text in (small, large, small))
    # So much time that it is memory which runs out.
    command = [sys.executable, "-m", "spool.services.gateway.grammar_check", str(tmp_path), "60"]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=True)
    before, refused, after = map(json.loads, done.stdout.splitlines())
    assert refused["too_costly"] == "it takes more than 256 MiB of memory to compile"
    assert before["definition"] == after["definition"]
