"""The draft engine: heads over some tokens only, and prompt lookup beside the model."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.drafting.model_draft import DraftEngine
from engine.drafting.prompt_lookup import TokenPlaces
from engine.errors import DraftVocabularyError
from engine.kv.pages import PageTable
from engine.models.draft_vocabulary import FILE_NAME
from engine.models.loading import load_draft_engine
from engine.passes.layout import BatchedSequence
from engine.passes.runner import PassResult
from engine.sampling.sampler import SamplingContext, sample_tokens
from engine.settings import EngineSettings
from engine.steps import Computing, ProposeRow
from scheduler.sampling import SamplingParameters
from tests.support.tiny_models import CONFIGS, TORCH_SHAPE, VOCABULARY, tiny_model

GREEDY = SamplingParameters()
SOME_TOKENS = list(range(0, VOCABULARY, 3))


def load(folder: Path, **changes: object) -> DraftEngine:
    fields = {
        "dtype": "float32",
        "threads": 1,
        "page_size": 4,
        "kv_pages": 200,
        "max_num_batched_tokens": 256,
    } | changes
    return load_draft_engine(EngineSettings(str(folder), **fields), lambda *_: None)  # type: ignore[arg-type]


def row(
    table: PageTable,
    history: list[int],
    draft_length: int,
    sampling: SamplingParameters = GREEDY,
    places: TokenPlaces | None = None,
) -> ProposeRow:
    """Feeds what the table lacks of the history."""
    fed = history[table.length :]
    known = TokenPlaces() if places is None else places
    return ProposeRow(table, fed, draft_length, history, len(history), sampling, known)


def save(folder: Path, family: str, tied: bool = False) -> Path:
    model = tiny_model(family, **TORCH_SHAPE)
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.save_pretrained(folder)
    return folder


# --- a head over some tokens only -------------------------------------------------------------------------------------


def proposed_by(
    model: PreTrainedModel, prompt: list[int], count: int, token_ids: list[int], sampling: SamplingParameters
) -> list[int]:
    """Token by token with the whole model, all logits but those of `token_ids` at -inf."""
    tokens = list(prompt)
    excluded = torch.ones(VOCABULARY, dtype=torch.bool)
    excluded[token_ids] = False
    for _ in range(count):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens])).logits[:, -1].masked_fill(excluded, -math.inf)
        (token,) = sample_tokens(logits, [SamplingContext(sampling, len(tokens), tokens, len(prompt))])
        assert token is not None
        tokens.append(token)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_proposals_are_those_of_the_whole_head_without_the_other_tokens(
    family: str, tied: bool, tmp_path: Path
) -> None:
    folder = save(tmp_path, family, tied)
    (folder / FILE_NAME).write_text(json.dumps({"token_ids": SOME_TOKENS}))
    # The folder is a whole model still.
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert reference(input_ids=torch.tensor([[1, 2]])).logits.shape == (1, 2, VOCABULARY)
    engine = load(folder)
    assert engine.description.vocabulary_size == VOCABULARY
    samplings = [
        GREEDY,
        SamplingParameters(temperature=0.9, seed=4),
        SamplingParameters(temperature=0.9, top_p=0.8, seed=5),
        SamplingParameters(repetition_penalty=1.5),
        SamplingParameters(temperature=0.5, logit_bias={3: 5.0, 4: 90.0}, seed=6),
    ]
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (1, 9, 20, 5, 13)]
    rows = [row(PageTable(), prompt, 6, sampling) for prompt, sampling in zip(prompts, samplings, strict=True)]
    outcomes = engine.step(rows).rows
    proposals = [outcome.tokens for outcome in outcomes]
    assert proposals == [
        proposed_by(reference, prompt, 6, SOME_TOKENS, sampling)
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    assert proposals[0] != proposed_by(reference, prompts[0], 6, list(range(VOCABULARY)), GREEDY)
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        text = torch.tensor([[*prompt, *outcome.tokens[:-1]]])
        with torch.no_grad():
            logits = reference(input_ids=text).logits[0, len(prompt) - 1 :, SOME_TOKENS]
        columns = torch.tensor([SOME_TOKENS.index(token) for token in outcome.tokens])
        probabilities = logits.softmax(1).gather(1, columns[:, None])[:, 0]
        assert outcome.confidences == pytest.approx(probabilities.tolist(), rel=1e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_a_smaller_head_in_low_precision(tied: bool, tmp_path: Path) -> None:
    """Each proposal is the best of the tokens there are, as near as bfloat16 tells them apart."""
    folder = save(tmp_path, "llama", tied)
    (folder / FILE_NAME).write_text(json.dumps({"token_ids": SOME_TOKENS}))
    prompt = [5, 17, 80, 3]
    (outcome,) = load(folder, dtype="bfloat16").step([row(PageTable(), prompt, 12)]).rows
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = reference(input_ids=torch.tensor([prompt + outcome.tokens])).logits[0, len(prompt) - 1 : -1]
    assert len(outcome.tokens) == 12
    assert set(outcome.tokens) <= set(SOME_TOKENS)
    lost = logits[:, SOME_TOKENS].amax(1) - logits[torch.arange(12), outcome.tokens]
    assert lost.max() < 0.05 * logits.std()


def test_tokens_that_the_model_has_not_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, "llama")
    (folder / FILE_NAME).write_text(json.dumps({"token_ids": [0, VOCABULARY]}))
    with pytest.raises(DraftVocabularyError, match=rf"token_ids\[1\] is {VOCABULARY}, .* below the vocabulary size"):
        load(folder)


# --- prompt lookup beside the model -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("draft"), "llama")


def passes_of(engine: DraftEngine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The rows that each sequence feeds, for every pass from now on."""
    passes: list[list[int]] = []
    run = engine._runner.run

    def counted(sequences: list[BatchedSequence], computing: Computing) -> PassResult:
        passes.append([len(sequence.tokens) for sequence in sequences])
        return run(sequences, computing)

    monkeypatch.setattr(engine._runner, "run", counted)
    return passes


def test_what_was_there_before_is_proposed_in_one_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(folder, lookup_match=3)
    passes = passes_of(engine, monkeypatch)
    found = [1, 2, 3, 9, 8, 7, 6, 1, 2, 3]
    too_short = [1, 2, 3, 9, 8, 7, 6, 5, 2, 3]
    tables = [PageTable(), PageTable()]
    (looked_up,) = engine.step([row(tables[0], found, 4)]).rows
    assert looked_up.tokens == [9, 8, 7, 6]
    assert looked_up.confidences == [0.75] * 4
    assert passes == [[13]]
    assert tables[0].length == 13
    passes.clear()
    (drafted,) = engine.step([row(tables[1], too_short, 4)]).rows
    assert drafted.tokens == load(folder).step([row(PageTable(), too_short, 4)]).rows[0].tokens
    assert passes == [[10], [1], [1], [1]]
    engine.pool.check_conservation(tables)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParameters(temperature=0.8, seed=3)])
def test_rounds_with_lookup_keep_the_models_kv_right(folder: Path, sampling: SamplingParameters) -> None:
    """Rounds that accept a random part of each proposal; what the model proposes is what it does from scratch."""
    rng = random.Random(8)
    engine, plain = load(folder, lookup_match=2), load(folder)
    histories = [[rng.randrange(12) for _ in range(length)] for length in (5, 9, 17, 30)]
    tables = [PageTable() for _ in histories]
    places = [TokenPlaces() for _ in histories]
    looked_up = drafted = 0
    for _ in range(40):
        rows = [row(*state, 4, sampling, known) for *state, known in zip(tables, histories, places, strict=True)]
        for history, table, known, outcome in zip(histories, tables, places, engine.step(rows).rows, strict=True):
            expected = TokenPlaces()
            expected.follow(history)
            continuation = expected.continuation(4, 2, 32)
            looked_up += bool(continuation)
            drafted += not continuation
            if not continuation:
                scratch = PageTable()
                (continuation,) = (o.tokens for o in plain.step([row(scratch, history, 4, sampling)]).rows)
                plain.pool.free(scratch)
            assert outcome.tokens == continuation
            assert table.length == len(history) + 3
            accepted = rng.randint(0, 4)
            engine.pool.truncate(table, len(history) + min(accepted, 3))
            known.truncate(table.length)
            history += [*outcome.tokens[:accepted], rng.choice(history[:9])]
            if len(history) > 120:
                kept = rng.randrange(3, 9)
                del history[kept:]
                engine.pool.truncate(table, kept - 1)
                known.truncate(kept - 1)
    assert looked_up > 20
    assert drafted > 20
    engine.pool.check_conservation(tables)


def test_a_row_that_fills_a_pass_is_left_to_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(folder, lookup_match=2, max_num_batched_tokens=16)
    passes = passes_of(engine, monkeypatch)
    full, nearly = [1, 2] * 8, [1, 2] * 6 + [1]
    outcomes = engine.step([row(PageTable(), full, 4), row(PageTable(), nearly, 4)]).rows
    assert outcomes[1].tokens == [2, 1, 2, 1]
    assert passes == [[16], [16], [1], [1], [1]]


def test_lookup_without_pages_for_it_is_left_to_the_model(folder: Path) -> None:
    engine = load(folder, lookup_match=2, kv_pages=2)
    table = PageTable()
    (outcome,) = engine.step([row(table, [1, 2, 1, 2, 1, 2], 5)]).rows
    assert outcome.tokens == load(folder).step([row(PageTable(), [1, 2, 1, 2, 1, 2], 3)]).rows[0].tokens
    assert table.length == 8


def test_rows_that_only_feed_look_nothing_up(folder: Path) -> None:
    engine = load(folder, lookup_match=1)
    table = PageTable()
    (outcome,) = engine.step([row(table, [1, 1, 1], 0)]).rows
    assert outcome.tokens == []
    assert table.length == 3
