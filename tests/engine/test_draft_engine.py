"""The draft engine: heads over some tokens only, other vocabularies, and proposals from round to round."""

from __future__ import annotations

import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders
from transformers import AutoModelForCausalLM, PreTrainedModel

from spool.engine.attention.paged_step import ATTENTION_NAME
from spool.engine.drafting.lookup.prompt_lookup import TokenPlaces
from spool.engine.drafting.model_draft import DraftEngine
from spool.engine.errors import DraftVocabularyError, TokenizerError
from spool.engine.kv.pages import PageTable
from spool.engine.models import loading
from spool.engine.models.loading import draft_engine_of, load_draft_engine, load_target_engine
from spool.engine.models.source import DRAFT_VOCABULARY
from spool.engine.sampling.context import SamplingContext
from spool.engine.sampling.sampler import sample_tokens
from spool.engine.settings import EngineSettings
from spool.engine.steps import ProposeRow, RowOutcome
from spool.scheduler.config import Policy, SchedulerConfig
from spool.scheduler.sampling import SamplingParameters
from tests.support.command_line import CHARACTERS, save_tokenizer
from tests.support.in_process import Output, executor_of, requests_of, run_in_process
from tests.support.renumbered import save_renumbered
from tests.support.tiny_models import TORCH_SHAPE, VOCABULARY, save_tiny_pair, tiny_model

GREEDY = SamplingParameters()
SOME_TOKENS = list(range(0, VOCABULARY, 3))


def load(source: Path | PreTrainedModel, chained: bool = False, **changes: object) -> DraftEngine:
    """`chained`: as on a GPU, it reads proposals once all of their tokens are chosen."""
    fields = {"dtype": "float32", "threads": 1, "page_size": 16, "kv_pages": 50, "max_num_batched_tokens": 64} | changes
    settings = EngineSettings("draft" if isinstance(source, PreTrainedModel) else str(source), **fields)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "DraftEngine", lambda *given: DraftEngine(*given[:-1], chained))
        if isinstance(source, PreTrainedModel):
            return draft_engine_of(source, settings, lambda *_: None)
        return load_draft_engine(settings, lambda *_: None)


def row(
    table: PageTable,
    history: list[int],
    draft_length: int,
    sampling: SamplingParameters = GREEDY,
    places: TokenPlaces | None = None,
) -> ProposeRow:
    """Feeds what the table lacks of the history."""
    known = TokenPlaces() if places is None else places
    return ProposeRow(table, history[table.length :], draft_length, history, len(history), sampling, known)


def save(folder: Path, family: str, token_ids: list[int] | None = None, tied: bool = False) -> Path:
    model = tiny_model(family, **TORCH_SHAPE)
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.save_pretrained(folder)
    if token_ids is not None:
        (folder / DRAFT_VOCABULARY).write_text(json.dumps({"token_ids": token_ids}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("draft"), "llama")


@pytest.fixture(scope="module")
def restricted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head over some tokens only."""
    return save(tmp_path_factory.mktemp("restricted"), "llama", SOME_TOKENS)


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


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen3", True), ("glm4", False)])
def test_proposals_are_those_of_the_whole_head_without_the_other_tokens(
    family: str, tied: bool, tmp_path: Path
) -> None:
    folder = save(tmp_path, family, SOME_TOKENS, tied)
    # To other servers the folder is a whole model.
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
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
    assert [outcome.tokens for outcome in outcomes] == [
        proposed_by(reference, prompt, 6, SOME_TOKENS, sampling)
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]


def test_tokens_that_the_model_has_not_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "llama", [0, VOCABULARY])
    with pytest.raises(DraftVocabularyError, match=rf"token_ids\[1\] is {VOCABULARY}, .* below the vocabulary size"):
        load(tmp_path)


# --- a vocabulary that is not the target's ----------------------------------------------------------------------------

SHUFFLED = random.Random(5).sample(range(VOCABULARY), VOCABULARY)
KNOWN = SHUFFLED[:60]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a draft with its tokenizer; the same draft with its tokens under other ids, and with some of them;
    and as `short`, the one with other ids for sequences of up to 30 tokens."""
    folder = tmp_path_factory.mktemp("models")
    for path, name in zip(save_tiny_pair("llama", folder), ("target", "draft"), strict=True):
        save_tokenizer(path.rename(folder / name))
    for name, order in (("other-ids", SHUFFLED), ("fewer", KNOWN), ("short", SHUFFLED)):
        save_renumbered(folder / "draft", folder / name, order)
    config = json.loads((folder / "short/config.json").read_text())
    (folder / "short/config.json").write_text(json.dumps(config | {"max_position_embeddings": 30}))
    return folder


@pytest.mark.parametrize("own", [None, [3, 20, 31, 44]])
def test_a_smaller_vocabulary_proposes_of_its_tokens(models: Path, own: list[int] | None, tmp_path: Path) -> None:
    """Tokens that it lacks are its first one to it."""
    folder = shutil.copytree(models / "fewer", tmp_path / "draft")
    known = sorted(KNOWN if own is None else [KNOWN[number] for number in own])
    if own is not None:
        (folder / DRAFT_VOCABULARY).write_text(json.dumps({"token_ids": own}))
    reference = AutoModelForCausalLM.from_pretrained(models / "draft", dtype=torch.float32)
    engine = load(folder, target=str(models / "target"))
    assert engine.description.vocabulary_size == VOCABULARY
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (1, 9, 20, 13)]
    samplings = [SamplingParameters(temperature=number // 2 * 0.9, seed=number) for number in range(4)]
    rows = [row(PageTable(), prompt, 6, sampling) for prompt, sampling in zip(prompts, samplings, strict=True)]
    seen = [[token if token in KNOWN else KNOWN[0] for token in prompt] for prompt in prompts]
    assert [outcome.tokens for outcome in engine.step(rows).rows] == [
        proposed_by(reference, prompt, 6, known, sampling) for prompt, sampling in zip(seen, samplings, strict=True)
    ]


@pytest.mark.parametrize("changes", [{}, {"quantization": "int8"}, {"quantization": "int4"}])
def test_tokens_under_other_ids_are_accepted_as_often(models: Path, changes: dict[str, str]) -> None:
    settings = EngineSettings(str(models / "target"), "float32", threads=1, kv_pages=100, max_num_batched_tokens=64)
    target = load_target_engine(settings, lambda *_: None)
    rng = random.Random(2)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (2, 17, 9, 25, 40)]
    requests = requests_of(prompts, 24, (0.0, 0.7))

    def run(draft: str | None) -> dict[int, Output]:
        engine = None if draft is None else load(models / draft, target=str(models / "target"), **changes)
        if engine is not None:
            assert engine.description.tokenizer_digest == target.description.tokenizer_digest
        config = SchedulerConfig(policy=Policy.RAGGED, draft_length=4 if engine is not None else 0)
        return run_in_process(config, {"target": executor_of(target, engine, prefix_cache=False)}, requests)

    plain, own, others = run(None), run("draft"), {name: run(name) for name in ("other-ids", "fewer", "short")}
    for outputs in (own, *others.values()):
        assert {number: output.tokens for number, output in outputs.items()} == {
            number: output.tokens for number, output in plain.items()
        }
        assert sum(accepted for output in outputs.values() for _, accepted in output.rounds) > 0
    for number, output in own.items():
        assert others["other-ids"][number].rounds == output.rounds
        length = len(prompts[number])
        for (drafted, _), (of_short, accepted) in zip(output.rounds, others["short"][number].rounds, strict=False):
            # The last proposed token is not fed.
            assert of_short == min(drafted, max(0, 30 + 1 - length))
            if of_short < drafted:
                break
            length += accepted + 1


def test_another_tokenizer_is_refused(models: Path, tmp_path: Path) -> None:
    target, folder = str(models / "target"), shutil.copytree(models / "draft", tmp_path / "draft")
    save_tokenizer(folder, [*CHARACTERS[:40], *(f"<{number}>" for number in range(40, VOCABULARY))])
    reason = "40 tokens are the same in target and draft, must be at least 48, .* differs is 40 of target, 'I'"
    with pytest.raises(TokenizerError, match=reason):
        load(folder, target=target)
    # Nobody knows the target here: the scheduler finds out.
    unmapped, fitting = (load(path, target="/no/such/model").description for path in (folder, models / "draft"))
    assert unmapped.tokenizer_digest != fitting.tokenizer_digest
    save_tokenizer(folder, CHARACTERS[::-1])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="the first that differs is 1 of target"):
        load(folder, target=target)


# --- proposals from round to round, read token by token or all at once ------------------------------------------------

chained_or_not = pytest.mark.parametrize("chained", [False, True], ids=["token by token", "chained"])


@chained_or_not
def test_a_match_is_proposed_in_one_pass(folder: Path, chained: bool) -> None:
    engine = load(folder, chained, lookup_match=3)
    passes: list[None] = []
    found, too_short = [1, 2, 3, 9, 8, 7, 6, 1, 2, 3], [1, 2, 3, 9, 8, 7, 6, 5, 2, 3]
    tables = [PageTable(), PageTable()]
    (looked_up,) = engine.step([row(tables[0], found, 4)], lambda: passes.append(None)).rows
    assert looked_up.tokens == [9, 8, 7, 6]
    assert len(passes) == 1
    assert tables[0].length == 13
    (drafted,) = engine.step([row(tables[1], too_short, 4)], lambda: passes.append(None)).rows
    assert drafted.tokens == load(folder).step([row(PageTable(), too_short, 4)]).rows[0].tokens
    assert len(passes) == 1 + 4
    engine.pool.check_conservation(tables)


@pytest.mark.parametrize(
    ("head", "chained", "sampling", "changes"),
    [
        ("folder", False, GREEDY, {"lookup_match": 2}),
        ("folder", False, SamplingParameters(temperature=0.8, seed=3), {"lookup_match": 2}),
        ("folder", True, GREEDY, {"lookup_match": 2}),
        ("restricted", True, GREEDY, {"max_num_batched_tokens": 12}),
    ],
)
def test_rounds_keep_the_models_kv_right(
    head: str,
    chained: bool,
    sampling: SamplingParameters,
    changes: dict[str, int],
    request: pytest.FixtureRequest,
) -> None:
    """Random parts of proposals are accepted, of lengths that differ by row and round; what the model proposes is what
    it does from scratch."""
    rng = random.Random(8)
    path = request.getfixturevalue(head)
    engine, scratch = load(path, chained, **changes), load(path, max_num_batched_tokens=256)
    histories = [[rng.randrange(12) for _ in range(length)] for length in (1, 4, 9, 12)]
    tables = [PageTable() for _ in histories]
    places = [TokenPlaces() for _ in histories]
    looked_up = drafted = 0
    for _ in range(20):
        lengths = [rng.randrange(6) for _ in histories]
        rows = [
            row(table, history, length, sampling, known)
            for table, history, length, known in zip(tables, histories, lengths, places, strict=True)
        ]
        for of_row, history, outcome in zip(rows, histories, engine.step(rows).rows, strict=True):
            expected, length, table = TokenPlaces(), of_row.draft_length, of_row.table
            expected.follow(history)
            continuation = expected.continuation(length, 2, 32) if length and "lookup_match" in changes else []
            looked_up += bool(continuation)
            if length and not continuation:
                (plain,) = scratch.step([row(empty := PageTable(), history, length, sampling)]).rows
                scratch.pool.free(empty)
                continuation = plain.tokens
                drafted += 1
            assert outcome.tokens == continuation
            assert table.length == len(history) + max(0, length - 1)
            accepted = rng.randint(0, length)
            engine.pool.truncate(table, min(len(history) + accepted, table.length))
            of_row.places.truncate(table.length)
            history += [*outcome.tokens[:accepted], rng.choice(history[:9])]
    assert looked_up > 4 or "lookup_match" not in changes
    assert drafted > 8
    engine.pool.check_conservation(tables)


ALTERNATIVES = {
    "greedy": GREEDY,
    "sampled": SamplingParameters(temperature=0.8, seed=3),
    "filtered": SamplingParameters(temperature=1.2, top_k=9, seed=4),
    "penalties": SamplingParameters(temperature=0.8, repetition_penalty=1.3, seed=6),
}


@chained_or_not
@pytest.mark.parametrize("head", ["folder", "restricted"])
def test_alternatives_are_what_would_be_chosen_without_the_tokens(
    head: str, chained: bool, request: pytest.FixtureRequest
) -> None:
    """Rows propose the same whether they are asked for."""
    path = request.getfixturevalue(head)
    histories = [[1 + place, 2, 3] for place in range(len(ALTERNATIVES))]

    def proposed(alternatives: bool) -> list[RowOutcome]:
        rows = [
            row(PageTable(), history, 4, sampling)
            for history, sampling in zip(histories, ALTERNATIVES.values(), strict=True)
        ]
        for each in rows:
            each.alternatives = alternatives
        return load(path, chained).step(rows).rows

    found, without = proposed(True), proposed(False)
    assert [outcome.tokens for outcome in found] == [outcome.tokens for outcome in without]
    assert [outcome.alternatives for outcome in without] == [[-1] * 4] * len(without)
    for history, sampling, outcome in zip(histories, ALTERNATIVES.values(), found, strict=True):
        for place, (token, other) in enumerate(zip(outcome.tokens, outcome.alternatives, strict=True)):
            if sampling.uses_history and chained and place:
                continue  # penalties count no token of the proposal there
            banned = replace(sampling, logit_bias={token: -100.0})
            of_row = row(PageTable(), [*history, *outcome.tokens[:place]], 1, banned)
            of_row.prompt_length = len(history)
            assert load(path).step([of_row]).rows[0].tokens == [other]


@chained_or_not
def test_a_step_that_is_interrupted_proposes_less(chained: bool, folder: Path) -> None:
    """And the next one goes on behind that."""
    histories, lengths = [[1, 2, 3], [4, 5, 6, 7, 8], [9]], [5, 1, 4]
    engine, tables = load(folder, chained), [PageTable() for _ in histories]
    rows = [row(table, history, length) for table, history, length in zip(tables, histories, lengths, strict=True)]
    whole = [outcome.tokens for outcome in load(folder).step([replace(one, table=PageTable()) for one in rows]).rows]
    passes, waits = list[None](), iter([False, True])
    first = engine.step(rows, lambda: passes.append(None), lambda: next(waits)).rows
    assert [outcome.tokens for outcome in first] == [tokens[:2] for tokens in whole]
    assert len(passes) <= 3
    further = [
        row(table, [*history, *outcome.tokens], length - len(outcome.tokens))
        for table, history, length, outcome in zip(tables, histories, lengths, first, strict=True)
    ]
    others = engine.step(further, interrupted=lambda: False).rows
    assert [[*one.tokens, *two.tokens] for one, two in zip(first, others, strict=True)] == whole
    engine.pool.check_conservation(tables)


@chained_or_not
@pytest.mark.parametrize("pages", [3, 5, 8])
def test_without_pages_rows_propose_less(pages: int, chained: bool, folder: Path) -> None:
    histories = [[1, 2, 3] * 5, [4, 5, 6, 7, 8] * 6, [9] * 16, [2] * 47]
    lengths = [9, 2, 5, 4]
    engine, tables = load(folder, chained, kv_pages=pages), [PageTable() for _ in histories]
    rows = [row(table, history, length) for table, history, length in zip(tables, histories, lengths, strict=True)]
    found = engine.step(rows).rows
    for history, length, table, outcome in zip(histories, lengths, tables, found, strict=True):
        (whole,) = load(folder).step([row(PageTable(), history, length)]).rows
        assert outcome.tokens == whole.tokens[: len(outcome.tokens)]
        assert outcome.out_of_pages == (not outcome.tokens)
        assert table.length == (len(history) + len(outcome.tokens) - 1 if outcome.tokens else 0)
    assert sum(len(outcome.tokens) for outcome in found) < sum(lengths)
    assert engine.pool.free_pages < 4
    engine.pool.check_conservation(tables)


@chained_or_not
def test_logits_that_are_not_finite_are_an_error_of_their_row(folder: Path, chained: bool) -> None:
    """At first, and once some tokens are chosen; the others do not notice."""
    histories = [[1, 2, 3, 4], [5, 6], [7, 8, 9]]
    expected = load(folder).step([row(PageTable(), history, 4) for history in histories]).rows
    poisoned = expected[2].tokens[1]
    assert poisoned not in {*expected[1].tokens, *histories[1], *histories[2], expected[2].tokens[0]}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=ATTENTION_NAME)
    engine, tables = load(model, chained), [PageTable() for _ in histories]
    with torch.no_grad():
        model.get_input_embeddings().weight[poisoned] = torch.nan
    # The first row feeds it at once, the last one as the second token of its proposal.
    histories[0][1] = poisoned
    found = engine.step([row(table, history, 4) for table, history in zip(tables, histories, strict=True)]).rows
    assert [outcome.error for outcome in found] == ["the draft's logits are not finite", None, found[0].error]
    assert [outcome.tokens for outcome in found] == [[], expected[1].tokens, expected[2].tokens[:2]]
    assert [table.length for table in tables] == [0, 5, 0]
    # Whoever gets the pages next finds nothing of it there.
    (again,) = engine.step([row(PageTable(), [9] * 9, 3)]).rows
    assert again.tokens == load(folder).step([row(PageTable(), [9] * 9, 3)]).rows[0].tokens
    assert again.error is None
