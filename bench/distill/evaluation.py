"""How often a draft agrees with the target, and the tokens per round that follow (see `bench.distill.rounds`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bench.distill.answers import NO_CATEGORY, Answer
from bench.distill.dialogue import TokenKind
from bench.distill.rounds import RoundCount, count_rounds, drafted, looked_up, proposes_nothing
from bench.distill.shards import Shard
from bench.distill.student import Student

ALL = "all"
_ROWS = 16


@dataclass(slots=True)
class Score:
    """Of some answers: `matches` of `positions` tokens proposed right (teacher-forced), and rounds by who proposes."""

    answers: int = 0
    positions: int = 0
    matches: int = 0
    draft: RoundCount = field(default_factory=RoundCount)
    lookup: RoundCount | None = None
    combined: RoundCount | None = None

    @property
    def agreement(self) -> float:
        return self.matches / self.positions if self.positions else 0.0

    def summary(self) -> dict[str, float]:
        figures = {"answers": self.answers, "positions": self.positions, "agreement": self.agreement}
        for name in ("draft", "lookup", "combined"):
            rounds: RoundCount | None = getattr(self, name)
            if rounds is not None:
                figures[f"{name}_tokens_per_round"] = rounds.tokens_per_round
        return {name: round(value, 4) for name, value in figures.items()}


def score(
    answers: Iterable[tuple[Answer, Sequence[bool]]], draft_length: int, lookup_match: int | None
) -> dict[str, Score]:
    """By category in ascending order, then of all; each answer comes with which of its tokens the draft proposes."""
    scores: dict[str, Score] = {}
    for answer, matches in answers:
        length = len(answer.tokens)
        by_draft = drafted(matches, draft_length)
        for name in (answer.category, ALL):
            total = scores.setdefault(name, Score())
            total.answers += 1
            total.positions += length
            total.matches += sum(matches)
            total.draft.add(count_rounds(length, by_draft))
            if lookup_match is None:
                continue
            total.lookup, total.combined = total.lookup or RoundCount(), total.combined or RoundCount()
            for rounds, otherwise in ((total.lookup, proposes_nothing), (total.combined, by_draft)):
                by_lookup = looked_up(answer.prompt, answer.tokens, draft_length, lookup_match, otherwise)
                rounds.add(count_rounds(length, by_lookup))
    overall = scores.pop(ALL, Score())
    return dict(sorted(scores.items())) | {ALL: overall}


@torch.inference_mode()
def draft_matches(draft: PreTrainedModel, token_ids: Tensor | None, answer: Answer) -> list[bool]:
    """Which tokens of the answer the draft proposes after the target's own text; `token_ids` as in `DraftEngine`."""
    text = torch.tensor([[*answer.prompt, *answer.tokens]], device=draft.device)
    hidden = draft.get_decoder()(text).last_hidden_state[0, len(answer.prompt) - 1 : -1]
    chosen = draft.get_output_embeddings()(hidden).float().argmax(-1)
    chosen = chosen if token_ids is None else token_ids.to(chosen.device)[chosen]
    return (chosen == text[0, len(answer.prompt) :]).tolist()


@torch.inference_mode()
def held_out_matches(
    student: Student, head: Tensor, token_ids: Tensor, shard: Shard
) -> Iterator[tuple[Answer, list[bool]]]:
    """The greedy answers of a shard that nothing was learnt from, and which tokens the student proposes."""
    device = head.device
    token_ids = token_ids.to(device, torch.int64)
    proposed = head[token_ids]
    for first in range(0, shard.rows, _ROWS):
        rows = shard.read(first, min(_ROWS, shard.rows - first))
        with torch.autocast(device.type, torch.bfloat16):
            hidden = student(rows.features.to(device).float()).to(head.dtype)
        for tokens, kinds, states in zip(rows.token_ids, rows.kinds, hidden, strict=True):
            for start, end in _runs((kinds == TokenKind.GREEDY).tolist()):
                chosen = token_ids[(states[start - 1 : end - 1] @ proposed.T).float().argmax(-1)].cpu()
                written = tokens[start:end].long()
                yield Answer(NO_CATEGORY, (), tuple(written.tolist())), (chosen == written).tolist()


def _runs(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Start and end of every stretch of true flags; nothing foretells what stands first."""
    start = None
    for index, flag in enumerate([*flags, False]):
        if flag and start is None:
            start = index
        elif not flag and start is not None:
            if index > (start := max(start, 1)):
                yield start, index
            start = None
