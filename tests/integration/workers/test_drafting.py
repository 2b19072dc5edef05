"""A target's remote proposer and a real draft server, with gRPC between them and a tiny model behind."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from engine.drafting.draft_kv import DraftKv
from engine.drafting.model_draft import DraftEngine
from engine.drafting.model_drafting import DraftAsk, ModelDrafting
from engine.models.loading import load_draft_engine
from engine.settings import EngineSettings
from scheduler.sampling import SamplingParameters
from services.worker.drafting.remote import RemoteProposer
from tests.support.draft_servers import PlayedSequence, RunningDraft, offer, running_draft, take
from tests.support.tiny_models import TORCH_SHAPE, VOCABULARY, tiny_model
from tests.support.waiting import wait_until

SAMPLINGS = (
    SamplingParameters(),
    SamplingParameters(temperature=0.8, seed=5),
    SamplingParameters(repetition_penalty=1.3, seed=6),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    tiny_model("llama", **TORCH_SHAPE).save_pretrained(folder)
    return folder


def load(folder: Path, **changes: object) -> DraftEngine:
    fields = {"dtype": "float32", "threads": 1, "page_size": 4, "kv_pages": 200, "max_num_batched_tokens": 64} | changes
    return load_draft_engine(EngineSettings(str(folder), **fields), lambda *_: None)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[RunningDraft]:
    with running_draft(lambda: load(folder)) as running:
        yield running


class Oracle:
    """What the draft model proposes when it is asked directly, each sequence alone."""

    def __init__(self, folder: Path) -> None:
        self._drafting = ModelDrafting(load(folder), prefix_cache=False)
        self._kv: dict[int, DraftKv] = {}

    def proposal(self, one: PlayedSequence, draft_length: int) -> list[int]:
        kv = self._kv.setdefault(one.sequence_id, DraftKv())
        tokens = one.tokens.tokens
        while True:
            ask = DraftAsk(kv, tokens[:-1], tokens[-1:], len(one.prompt), one.sampling, draft_length)
            (answer,) = self._drafting.propose([ask])
            if not answer.behind:
                return list(answer.tokens)


def connected(proposer: RemoteProposer) -> None:
    """Waits until it has a stream."""

    def is_connected() -> bool:
        return proposer.connected

    wait_until(is_connected, "the target has a stream to the draft", pause=0.01)


def proposed(proposer: RemoteProposer, sequences: Sequence[PlayedSequence], most: int) -> list[list[int]]:
    """Once all of the sequences have a proposal."""
    wait_until(lambda: all(take(proposer, sequences, most)), "the draft proposes", pause=0.01)
    return take(proposer, sequences, most)


def prompts(draw: random.Random, count: int, length: int = 9) -> list[list[int]]:
    return [[draw.randrange(VOCABULARY) for _ in range(draw.randint(1, length))] for _ in range(count)]


def test_proposals_are_the_models_over_rounds_with_rejections(running: RunningDraft, folder: Path) -> None:
    draw, oracle = random.Random(1), Oracle(folder)
    sequences = [
        PlayedSequence(number, prompt, SAMPLINGS[number % len(SAMPLINGS)])
        for number, prompt in enumerate(prompts(draw, 6, 100), 1)
    ]
    with closing(RemoteProposer(VOCABULARY)) as proposer:
        proposer.set_grant(running.grant())
        connected(proposer)
        offer(proposer, sequences, 4)  # their prompts alone
        for one in sequences:
            one.commit(draw.randrange(VOCABULARY))
        for draft_length in (4, 3, 1, 5, 4, 2, 4, 4):
            offer(proposer, sequences, draft_length)
            found = proposed(proposer, sequences, draft_length)
            assert found == [oracle.proposal(one, draft_length) for one in sequences]
            for one, proposal in zip(sequences, found, strict=True):
                one.commit(*proposal[: draw.randint(0, len(proposal))], draw.randrange(VOCABULARY))
