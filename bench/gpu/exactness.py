"""Is every row of logits, bit by bit, that of plain decoding with one stream?"""

from __future__ import annotations

from bench.gpu.decoding import Stream, decode, free, prefill, prompts
from bench.gpu.engines import Bench, Engines

_PROMPT_TOKENS = 24
_DRAFT_LENGTH = 4


def exactness(bench: Bench, engines: Engines, name: str, streams: int, tokens: int, batch: int) -> None:
    """Streams one at a time, plain, against speculation with `batch` streams together; and against the tokens that the
    pair's weights imply."""
    alone = _decoded(engines, streams, tokens, 1, drafts=False)
    engines.pair.set_agreement(0.75)
    together = _decoded(engines, streams, tokens, batch, drafts=True)
    equal_rows = sum(
        one == other
        for mine, theirs in zip(alone, together, strict=True)
        for one, other in zip(mine.digests[:tokens], theirs.digests[:tokens], strict=True)
    )
    first = next(
        (
            (number, place)
            for number, (mine, theirs) in enumerate(zip(alone, together, strict=True))
            for place in range(tokens)
            if mine.digests[place] != theirs.digests[place]
        ),
        None,
    )
    bench.findings.add(
        f"logits alone and in speculation, {name}",
        streams=streams,
        tokens=tokens,
        batch=batch,
        rows=streams * tokens,
        equal_rows=equal_rows,
        first_unequal=first,
        equal_texts=sum(
            one.output[:tokens] == other.output[:tokens] for one, other in zip(alone, together, strict=True)
        ),
        expected_texts=sum(
            one.output[:tokens] == engines.pair.expected(one.prompt[-1], tokens) for one in (*alone, *together)
        ),
        compared_with_expected=2 * streams,
    )


def _decoded(engines: Engines, count: int, tokens: int, batch: int, drafts: bool) -> list[Stream]:
    """All streams to at least so many tokens, `batch` of them together until the last of them is done."""
    target, draft = engines.target, engines.draft if drafts else None
    found = []
    vocabulary = target.description.vocabulary_size
    asked = prompts(count, _PROMPT_TOKENS, vocabulary, seed=1)
    for first in range(0, count, batch):
        streams = [Stream(prompt) for prompt in asked[first : first + batch]]
        try:
            prefill(target, draft, streams, target.description.max_num_batched_tokens)
            while any(len(stream.output) < tokens for stream in streams):
                decode(target, draft, streams, 1, _DRAFT_LENGTH if drafts else 0, digests=True)
        finally:
            free(target, draft, streams)
        found += streams
    return found
