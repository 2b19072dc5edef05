"""Trains a drafting head for a target of the Llama kind, on text that the target writes. JSON on the last line.

    python -m bench.make_head MODEL --checkpoint FOLDER --parts 1 2 3 --output HEAD
    spool serve MODEL --draft HEAD

The text is written by `spool generate`, in *parts* of two thousand prompts each. After a part the checkpoint is saved
and the head is tried on part 0, which is never learnt from. Run again with further parts, training goes on from the
checkpoint: weights, and a record of the parts that were learnt from. What is random follows from a part's number; the
optimiser begins anew with each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench.make_head.checkpoint import load_checkpoint, save_checkpoint
from bench.make_head.head import TrainedHead
from bench.make_head.prompts import own_prompts
from bench.make_head.texts import Text, digest, write_texts
from bench.make_head.training import Settings, Trainer
from spool.deploy.errors import UsageError
from spool.deploy.models import fetch
from spool.deploy.progress import Reporter
from spool.engine.demo.convert import assemble_head, expanded_model
from spool.engine.models.draft_vocabulary import FIELD_NAME
from spool.engine.models.source import TRAINED_HEAD
from spool.scheduler.messages import Role
from spool.services.text.tokenizer import ModelTokenizer

_HELD_OUT = 0
"""The part that is never learnt from."""
_HELD_OUT_PROMPTS = 400
_PROMPTS = 2000


def make_head(asked: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Gives a record of each part that was learnt from: the digest of its texts, and by position how often the head
    was right on held-out text after it."""
    folder = fetch(asked.target, Role.TARGET, Reporter())
    tokenizer = ModelTokenizer(folder)
    target = expanded_model(folder, torch.bfloat16).eval().requires_grad_(False)

    def written(number: int) -> list[Text]:
        here = asked.checkpoint / f"part-{number}"
        count = _HELD_OUT_PROMPTS if number == _HELD_OUT else asked.count
        if asked.prompts is None:
            chats = own_prompts(asked.target, tokenizer, number, here, count)
        else:
            first = 0 if number == _HELD_OUT else _HELD_OUT_PROMPTS + (number - 1) * asked.count
            with asked.prompts.open() as lines:
                chats = [json.loads(line) for line in itertools.islice(lines, first, first + count)]
        return write_texts(asked.target, tokenizer, chats, number, here)

    records: list[dict[str, Any]] = []
    if (asked.checkpoint / TRAINED_HEAD).exists():
        head, records, vocabulary = load_checkpoint(target, asked.checkpoint)
    else:
        layers = target.config.num_hidden_layers
        head = TrainedHead(target, asked.feature_layers or [2, layers // 2, layers - 3])
        if asked.vocabulary_of is not None:
            vocabulary = json.loads(asked.vocabulary_of.read_text())[FIELD_NAME]
        else:
            vocabulary = frequent_tokens(written(asked.parts[0]), asked.vocabulary)
    settings = Settings(learning_rate=asked.learning_rate, epochs=asked.epochs)
    trainer = Trainer(target, head, vocabulary)
    held_out = written(_HELD_OUT)
    # Of these, greedy decoding accepts what is right.
    tried = trainer.see(held_out[: len(held_out) // 2], settings.batch_tokens, "reading held-out text")
    for number in asked.parts:
        texts = written(number)
        record = {"part": number, "digest": digest(texts), "tokens": sum(len(text.tokens) for text in texts)}
        if any(record.items() <= known.items() for known in records):
            console.print(f"part {number} is learnt already")
            continue
        began = time.monotonic()
        seen = trainer.see(texts, settings.batch_tokens, f"part {number}: reading")
        loss = trainer.train(seen, settings, random.Random(number), f"part {number}: learning")
        right = trainer.right(tried, settings.batch_tokens)
        record |= {"loss": loss, "right": right, "seconds": time.monotonic() - began}
        records.append(record)
        save_checkpoint(head, records, vocabulary, asked.checkpoint)
        console.print(f"part {number}: loss {loss:.3f}, right by position {', '.join(f'{r:.3f}' for r in right)}")
        if not asked.keep_texts:
            shutil.rmtree(asked.checkpoint / f"part-{number}")
    if asked.output is not None:
        assemble_head(folder, asked.output, asked.checkpoint)
    return records


def frequent_tokens(texts: Sequence[Text], size: int) -> list[int]:
    """The `size` most frequent tokens of the answers, ascending (FR-Spec, arXiv 2502.14856)."""
    counts = Counter(token for text in texts for token in text.tokens[text.start :])
    return sorted(sorted(counts, key=lambda token: (-counts[token], token))[:size])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="`demo`, a folder or a GGUF file with a Llama model")
    parser.add_argument("--checkpoint", type=Path, required=True, help="a folder, from which training goes on")
    parser.add_argument("--output", type=Path, help="a folder for the head")
    parser.add_argument(
        "--prompts", type=Path, help="JSON lines as for `spool generate`; unset: the target writes them"
    )
    parser.add_argument("--parts", type=int, nargs="+", default=[1], help="from 1 on")
    parser.add_argument("--count", type=int, default=_PROMPTS, help="prompts of a part")
    parser.add_argument("--epochs", type=int, default=Settings().epochs)
    parser.add_argument("--learning-rate", type=float, default=Settings().learning_rate)
    parser.add_argument("--feature-layers", type=int, nargs=3, help="of the target, whose inputs a new head reads")
    parser.add_argument("--vocabulary", type=int, default=8192, help="tokens that the head may propose")
    parser.add_argument("--vocabulary-of", type=Path, help="draft_vocabulary.json of another draft, in their place")
    parser.add_argument("--keep-texts", action="store_true")
    asked = parser.parse_args()
    try:
        print(json.dumps(make_head(asked, Console(stderr=True))))
    except (UsageError, ValueError, OSError) as error:
        print(f"make_head: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
