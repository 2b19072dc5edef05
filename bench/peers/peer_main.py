"""The process of a peer of `spool bench offline`: it answers each line of standard input with one line.

    python bench/peers/peer_main.py transformers_peer

The argument is the module of the peer, next to this file. Only that module is imported, so the process may run with a
Python that has no Spool. Standard input holds JSON lines. The first has models and prompts, each later one asks for a
measurement:

    {"target": "...", "draft": null, "dtype": "bfloat16", "device": "cpu", "threads": 2, "draft_length": 4,
     "max_rows": 8, "prompts": [[1, 2]], "max_tokens": [64], "stop_token_ids": [0]}
    {"batch_size": 8, "prompts": [0, 1], "drafting": false, "draft_length": 4}

`max_rows` is the largest batch to come. Standard output has the answers: {"event": "ready", "version": "..."}, then
{"event": "measured", "seconds": 1.5, "tokens": [[...]]} with an output for each prompt, up to and including the token
that ended it.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any


def lines_until_parent_ends() -> Iterator[str]:
    """Lines of standard input.

    At its end the parent is gone or wants no more. Then the whole process group is killed: a measurement under way,
    and processes that a library started.
    """
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=read, name="stdin", daemon=True).start()
    while True:
        yield lines.get()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Libraries log to standard output; their lines must not come between the answers.
    os.dup2(2, 1)
    peer: Any = None
    for line in lines_until_parent_ends():
        request = json.loads(line)
        if peer is None:
            peer = importlib.import_module(sys.argv[1]).Peer(request)
            answer = {"event": "ready", "version": peer.version}
        else:
            answer = {"event": "measured", **peer.measure(**request)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
