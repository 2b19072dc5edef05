"""The engine by itself: paged passes against transformers, rows that fail singly, exact shapes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig

from engine.attention.backends import AttentionForm
from engine.drafting.model_draft import DraftEngine
from engine.errors import ExactModeUnavailableError, UnsupportedModelError
from engine.exactness import calibration as exactness
from engine.exactness.calibration_cache import read_calibration
from engine.kv.pages import PageTable
from engine.models.loaded_model import LoadedModel
from engine.models.loading import load_draft_engine, load_target_engine
from engine.models.vocabulary import Vocabulary
from engine.passes.layout import BatchedSequence
from engine.settings import EngineSettings
from engine.steps import ProposeRow, RowOutcome, VerifyRow
from engine.target import TargetEngine
from scheduler.sampling import SamplingParameters
from tests.support.tiny_models import CONFIGS, TORCH_SHAPE, VOCABULARY, save_tiny_pair

GREEDY = SamplingParameters()


def silent(*_: object) -> None:
    pass


def load(folder: Path, **changes: object) -> TargetEngine:
    fields = {
        "dtype": "float32",
        "threads": 1,
        "page_size": 8,
        "kv_pages": 64,
        "exact": False,
        "max_num_batched_tokens": 96,
    } | changes
    return load_target_engine(EngineSettings(str(folder), **fields), silent)  # type: ignore[arg-type]


def verify(table: PageTable, tokens: list[int], drafts: list[int], history: list[int]) -> VerifyRow:
    return VerifyRow(table, tokens, drafts, True, history, len(history), GREEDY)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: save_tiny_pair(family, folder, **TORCH_SHAPE)[0] for family in CONFIGS}


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_paged_logits_are_those_of_transformers(family: str, folders: dict[str, Path]) -> None:
    """Sequences fed in random pieces, batched in random company, against one plain forward pass each."""
    rng = random.Random(5)
    engine = load(folders[family])
    reference = AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.float32)
    sequences = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (1, 7, 30, 61, 90)]
    tables = [PageTable() for _ in sequences]
    collected: list[list[torch.Tensor]] = [[] for _ in sequences]
    while unfinished := [i for i, tokens in enumerate(sequences) if tables[i].length < len(tokens)]:
        batch = []
        for index in rng.sample(unfinished, rng.randint(1, len(unfinished))):
            fed = sequences[index][tables[index].length :][: rng.choice((1, 3, 17))]
            engine.pool.append(tables[index], len(fed))
            batch.append((index, BatchedSequence(tables[index], fed, len(fed))))
        logits = engine._runner.run([sequence for _, sequence in batch]).logits
        for index, sequence in batch:
            collected[index].append(logits[: sequence.logits])
            logits = logits[sequence.logits :]
    for tokens, parts in zip(sequences, collected, strict=True):
        with torch.no_grad():
            expected = reference(input_ids=torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-4, atol=1e-4)


def test_rejected_tokens_leave_no_trace(folders: dict[str, Path]) -> None:
    engine = load(folders["llama"])
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    table = PageTable()
    (first,) = engine.step([verify(table, prompt, [], prompt)]).rows
    history = prompt + first.tokens
    assert table.length == len(prompt)
    wrong = [(first.tokens[0] + 1) % VOCABULARY] * 12
    engine.step([verify(table, first.tokens, wrong, history)])
    assert table.length <= len(history) + 1
    engine.pool.truncate(table, len(prompt))
    (again,) = engine.step([verify(table, first.tokens, [], history)]).rows
    fresh = PageTable()
    (recomputed,) = engine.step([verify(fresh, history, [], history)]).rows
    assert again.tokens == recomputed.tokens
    engine.pool.check_conservation([table, fresh])


def test_a_row_without_pages_fails_alone(folders: dict[str, Path]) -> None:
    engine = load(folders["llama"], kv_pages=6)
    long, short = [1] * 60, [2, 3]
    tables = [PageTable(), PageTable()]
    rows = [verify(table, prompt, [], prompt) for table, prompt in zip(tables, (long, short), strict=True)]
    failed, fine = engine.step(rows).rows
    assert failed.out_of_pages
    assert tables[0].length == 0
    assert len(fine.tokens) == 1
    engine.pool.check_conservation(tables)


def test_a_row_that_is_not_finite_fails_alone_and_spoils_no_page(folders: dict[str, Path]) -> None:
    engine = load(folders["llama"], kv_pages=8)
    poison, prompt = 7, [1, 2, 3, 4, 5]
    expected = engine.step([verify(PageTable(), prompt, [], prompt)]).rows[0].tokens
    engine.pool = type(engine.pool)(8, 8)
    with torch.no_grad():
        engine._runner.model.get_input_embeddings().weight[poison] = torch.nan
    bad, good = PageTable(), PageTable()
    rows = [verify(bad, [poison] * 20, [], [poison] * 20), verify(good, prompt, [], prompt)]
    failed, fine = engine.step(rows).rows
    assert failed.error == "the target's logits are not finite"
    assert bad.length == 0
    assert fine.tokens == expected
    engine.pool.free(good)
    # Every page has had the chance to be reused: nothing of the poison is left on any.
    whole = [1, 2, 3, 4, 5, 6] * 10
    (outcome,) = engine.step([verify(PageTable(), whole, [], whole)]).rows
    assert outcome.error is None


def test_a_model_that_raises_leaves_tables_as_they_were(folders: dict[str, Path]) -> None:
    engine = load(folders["llama"])
    table = PageTable()
    engine.step([verify(table, [1, 2, 3], [], [1, 2, 3])])
    with pytest.raises(IndexError):
        engine.step([verify(table, [VOCABULARY + 1], [], [1, 2, 3, VOCABULARY + 1])])
    assert table.length == 3
    engine.pool.check_conservation([table])


def test_a_step_larger_than_a_pass_is_cut(folders: dict[str, Path]) -> None:
    engine = load(folders["llama"], max_num_batched_tokens=16, kv_pages=64)
    prompts = [[index] * 9 for index in range(6)]
    tables = [PageTable() for _ in prompts]
    together = engine.step([verify(t, p, [], p) for t, p in zip(tables, prompts, strict=True)]).rows
    exclusive = [engine.step([verify(PageTable(), p, [], p)]).rows[0] for p in prompts]
    assert [row.tokens for row in together] == [row.tokens for row in exclusive]


def test_draft_proposes_less_when_pages_run_out(folders: dict[str, Path]) -> None:
    engine: DraftEngine = load_draft_engine(
        EngineSettings(str(folders["llama"]), "float32", threads=1, page_size=4, kv_pages=2), silent
    )
    table = PageTable()
    (row,) = engine.step([ProposeRow(table, [1, 2, 3, 4, 5], 7, [1, 2, 3, 4, 5], 5, GREEDY)]).rows
    assert row.error is None
    assert len(row.tokens) == 4
    assert table.length == 8


def test_chunks_without_choice_choose_nothing(folders: dict[str, Path]) -> None:
    engine = load(folders["llama"])
    table = PageTable()
    row = VerifyRow(table, [1, 2, 3], [], False, [1, 2, 3], 5, GREEDY)
    assert engine.step([row]).rows == [RowOutcome([])]
    assert table.length == 3


# --- exact mode -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_calibration_is_stored_and_read_again(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPOOL_CACHE", str(tmp_path))
    first = load(folders["llama"], exact=True)
    (file,) = (tmp_path / "calibrations").iterdir()
    stored = read_calibration(file)
    assert stored is not None
    assert stored.shapes.row_counts == first.description.exact_row_counts
    monkeypatch.setattr("engine.models.loading.calibrate", lambda *_: pytest.fail("calibrated again"))
    assert load(folders["llama"], exact=True).description == first.description
    with pytest.raises(pytest.fail.Exception):
        load(folders["llama"], exact=True, dtype="bfloat16")


def test_a_broken_calibration_file_is_not_believed(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text('{"shapes": {}}')
    assert read_calibration(file) is None


class _BatchDependentLinear(torch.nn.Linear):
    """A device whose results depend on how many rows a call has, in the last bits."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) * (1 + rows.shape[-2] * 1e-6)


def test_row_counts_with_other_bits_are_told_apart() -> None:
    model = torch.nn.Sequential(_BatchDependentLinear(16, 16))
    classes = exactness.row_count_classes(model, (2, 4, 8))  # type: ignore[arg-type]
    assert sorted(classes) == [(2,), (4,), (8,)]


def test_exact_mode_refuses_a_device_on_which_nothing_agrees(folders: dict[str, Path]) -> None:
    """Logits whose bits depend on their place in the pass fail the end-to-end check in every form of attention."""
    engine = load(folders["llama"])
    norm = engine._runner.model.model.norm
    norm.register_forward_hook(lambda _, __, out: out * (1 + torch.arange(out.shape[1])[None, :, None] * 1e-5))

    model = engine._runner.model
    loaded = LoadedModel(model, Vocabulary(b"", VOCABULARY), None, None)
    settings = EngineSettings(str(folders["llama"]), page_size=8, max_num_batched_tokens=24)
    first, *_ = loaded.forms(settings.page_size)
    one_shape = AttentionForm((512,), 8, 8)
    with pytest.raises(ExactModeUnavailableError, match="differs from plain decoding at position"):
        exactness.calibrate(model, loaded.runner, settings, [first, one_shape])


def test_kv_length_of_a_call_depends_on_the_position_alone() -> None:
    form = AttentionForm((16, 32, 64), 4)
    assert [form.kv_length(n) for n in (1, 16, 17, 32, 33, 64, 65, 128, 129)] == [16, 16, 32, 32, 64, 64, 128, 128, 192]


# --- models that do not fit -------------------------------------------------------------------------------------------


def test_sliding_windows_are_refused(tmp_path: Path) -> None:
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=1,
        num_attention_heads=6,
        num_key_value_heads=2,
        sliding_window=4,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="sliding"):
        load(tmp_path)


def test_a_model_without_tokenizer_counts_every_embedding(folders: dict[str, Path]) -> None:
    description = load(folders["llama"]).description
    assert description.vocabulary_size == VOCABULARY
    assert description.tokenizer_digest == b""


def test_sequences_end_where_the_settings_say(folders: dict[str, Path]) -> None:
    longest = load(folders["llama"], kv_pages=4096).description.max_sequence_length
    assert load(folders["llama"], max_model_len=40).description.max_sequence_length == 40
    with pytest.raises(UnsupportedModelError, match=f"max_model_len is {longest + 1}, must be at most {longest} for"):
        load(folders["llama"], max_model_len=longest + 1)


def test_log_probabilities_are_of_the_targets_own_distribution(folders: dict[str, Path]) -> None:
    engine = load(folders["llama"])
    prompt = [5, 4, 3]
    row = verify(PageTable(), prompt, [], prompt)
    row.top_logprobs = 4
    row.sampling = SamplingParameters(temperature=0.7, seed=3, top_k=5)
    (outcome,) = engine.step([row]).rows
    reference = AutoModelForCausalLM.from_pretrained(folders["llama"], dtype=torch.float32)
    with torch.no_grad():
        expected = torch.log_softmax(reference(input_ids=torch.tensor([prompt])).logits[0, -1], dim=-1)
    (logprobs,) = outcome.logprobs
    assert logprobs.token_id == outcome.tokens[0]
    assert logprobs.logprob == pytest.approx(expected[logprobs.token_id].item(), abs=1e-4)
    assert [token for token, _ in logprobs.top] == expected.topk(4).indices.tolist()
    assert [value for _, value in logprobs.top] == pytest.approx(expected.topk(4).values.tolist(), abs=1e-4)


def test_loading_says_what_exact_mode_chose_and_costs(folders: dict[str, Path]) -> None:
    said: list[str] = []
    settings = EngineSettings(
        str(folders["llama"]), "float32", threads=1, page_size=8, kv_pages=8, max_num_batched_tokens=24
    )
    load_target_engine(settings, lambda stage, _: said.append(stage))
    (summary,) = [stage for stage in said if stage.startswith("exact mode:")]
    assert "row counts from" in summary
    assert "logit rows bit-equal" in summary
    assert "ms for 1 row" in summary
