"""The recipe of the demo draft on a tiny pair: every stage against plain transformers, and stopping at any point."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from bench.distill import __main__ as command_line
from bench.distill.dialogue import DialogueStyle, TokenKind
from bench.distill.recipe import Distillation, Recipe
from bench.distill.shards import Batches, Shard, open_shards
from bench.distill.stages import Budget, Progress
from bench.distill.student import Student, StudentShape
from bench.distill.training import TrainingSettings
from bench.distill.vocabulary import choose_vocabulary, count_tokens
from bench.distill.writing import Writer, WritingSettings
from engine.models.draft_vocabulary import FILE_NAME, read_draft_vocabulary
from services.text.tokenizer import ModelTokenizer
from tests.support.tiny_chat import save_tiny_chat_model

pytestmark = pytest.mark.slow

WRITING = WritingSettings(
    seed=3, feature_layer=1, tokens=16 * 96, lengths=(96, 70), style=DialogueStyle(answer_limit=0.4, begun=0.2)
)
RECIPE = Recipe(
    shape=StudentShape(kept_layers=1, trained_layers=1),
    vocabulary_size=200,
    writing=WRITING,
    training=TrainingSettings(
        tokens=400, positions=100, other_tokens=30, learning_rate=5e-3, warm_up_steps=5, checkpoint_seconds=0
    ),
)
SHARDS, STEPS = 4, 60


def quiet(share: float, note: str) -> None:
    assert 0 <= share <= 1


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def writer(target: Path) -> Writer:
    return Writer(AutoModelForCausalLM.from_pretrained(target), AutoTokenizer.from_pretrained(target), WRITING)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    """A folder in which writing is done."""
    folder = tmp_path_factory.mktemp("written")
    Distillation(folder, RECIPE, target, "cpu").write(Budget(count=SHARDS), quiet)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    """A folder in which all is done, in one go."""
    folder = tmp_path_factory.mktemp("trained")
    distillation = Distillation(folder, RECIPE, target, "cpu")
    distillation.run(Budget(count=SHARDS), Budget(count=STEPS), lambda name: quiet)
    return folder


def contents(shards: list[Shard]) -> list[dict[str, torch.Tensor]]:
    return [load_file(shard.path) for shard in shards]


def same(first: list[dict[str, torch.Tensor]], second: list[dict[str, torch.Tensor]]) -> bool:
    return len(first) == len(second) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(first, second, strict=True)
    )


def stop_at(call: int) -> Progress:
    """Raises at that call, as if the user had stopped the command there."""
    calls = 0

    def progress(share: float, note: str) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt

    return progress


def test_writing_goes_on_where_it_stopped(writer: Writer, written: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        # In the middle of the second shard.
        writer.write(tmp_path, Budget(count=SHARDS), stop_at(96 + 1 + 30))
    assert [shard.path.name for shard in open_shards(tmp_path)] == ["00000.safetensors"]
    first = (tmp_path / "00000.safetensors").read_bytes()
    found = writer.write(tmp_path, Budget(count=SHARDS), quiet)
    assert (tmp_path / "00000.safetensors").read_bytes() == first
    assert same(contents(found), contents(open_shards(written / "shards")))
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())


def test_a_missing_shard_is_written_again(writer: Writer, written: Path, tmp_path: Path) -> None:
    expected = contents(open_shards(written / "shards"))
    for shard in open_shards(written / "shards"):
        shutil.copy(shard.path, tmp_path)
    (tmp_path / "00002.safetensors").unlink()
    assert same(contents(writer.write(tmp_path, Budget(count=SHARDS), quiet)), expected)


def test_every_row_is_read_once_in_a_pass(written: Path) -> None:
    shards = open_shards(written / "shards")
    wanted = sorted(str(ids.tolist()) for shard in shards for ids in shard.read().token_ids)
    batches = Batches(shards, 400, seed=1)
    first, second = [], []
    index = 0
    while len(first) < len(wanted):
        assert batches[index].token_ids.numel() <= 400
        first += [str(ids.tolist()) for ids in batches[index].token_ids]
        index += 1
    for later in range(index, 2 * index):
        second += [str(ids.tolist()) for ids in batches[later].token_ids]
    assert sorted(first) == sorted(second) == wanted
    assert first != second
    # Also when read out of order, as after an interruption.
    again = Batches(shards, 400, seed=1)
    assert torch.equal(again[index + 2].features, batches[index + 2].features)
    assert not torch.equal(Batches(shards, 400, seed=2)[0].token_ids[0], batches[0].token_ids[0])


def test_shards_depend_on_seed_and_number_alone(writer: Writer, written: Path, target: Path) -> None:
    expected = open_shards(written / "shards")[3].read()
    found = writer.shard(3)
    assert torch.equal(found.token_ids, expected.token_ids)
    assert torch.equal(found.features, expected.features)
    assert not torch.equal(writer.shard(1).token_ids, expected.token_ids)
    other = Writer(
        AutoModelForCausalLM.from_pretrained(target), AutoTokenizer.from_pretrained(target), replace(WRITING, seed=4)
    )
    assert not torch.equal(other.shard(3).token_ids, expected.token_ids)


def test_time_spent_on_shards_counts_when_writing_goes_on(writer: Writer, written: Path) -> None:
    shards = open_shards(written / "shards")
    spent = sum(shard.seconds for shard in shards) / 60
    assert len(writer.write(written / "shards", Budget(minutes=spent * 0.99), quiet)) == SHARDS


def test_shards_hold_what_a_plain_pass_gives(written: Path, target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(target)
    forbidden = [token for token in range(256, 259) if token != model.config.eos_token_id]
    for shard in open_shards(written / "shards"):
        rows = shard.read()
        assert rows.token_ids.shape == (WRITING.tokens // shard.length, shard.length)
        with torch.inference_mode():
            output = model(rows.token_ids.long(), output_hidden_states=True)
        torch.testing.assert_close(rows.features, output.hidden_states[1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(rows.final, output.hidden_states[-1], atol=1e-4, rtol=1e-4)
        logits = output.logits[:, :-1].clone()
        logits[..., forbidden] = float("-inf")
        greedy = rows.kinds[:, 1:] == TokenKind.GREEDY
        sampled = rows.kinds[:, 1:] == TokenKind.SAMPLED
        following = rows.token_ids[:, 1:].long()
        assert greedy.sum() > 100
        chosen = logits.gather(-1, following[..., None])[..., 0]
        torch.testing.assert_close(chosen[greedy], logits.amax(-1)[greedy], atol=1e-4, rtol=1e-4)
        assert sampled.sum() > 30
        assert not torch.equal(logits.argmax(-1)[sampled], following[sampled])


def test_the_vocabulary_has_the_most_frequent_tokens(written: Path) -> None:
    shards = open_shards(written / "shards")
    weights = {TokenKind.USER: 1, TokenKind.SAMPLED: 1, TokenKind.GREEDY: 4}
    expected: Counter[int] = Counter()
    for shard in shards:
        rows = shard.read()
        for token, kind in zip(rows.token_ids.flatten().tolist(), rows.kinds.flatten().tolist(), strict=True):
            expected[token] += weights.get(kind, 0)
    counts = count_tokens(shards, 259)
    assert counts.tolist() == [expected[token] for token in range(259)]
    chosen = choose_vocabulary(counts, 40, [256, 257, 258])
    ranking = sorted(range(259), key=lambda token: (-expected[token], token))[:40]
    assert chosen == sorted({*ranking, 256, 257, 258})
    with pytest.raises(ValueError, match=r"size is 260, must be at least 1 and at most the target's, 259"):
        choose_vocabulary(counts, 260, [256, 257, 258])


@pytest.mark.slow
def test_training_teaches(trained: Path, target: Path, tmp_path: Path) -> None:
    """Compared with a training of one step, which is hardly any, on text neither has seen."""
    notes: list[str] = []
    beginner = Distillation(tmp_path, RECIPE, target, "cpu")
    beginner.write(Budget(count=SHARDS), quiet)
    beginner.train(Budget(count=1), quiet)
    untrained = beginner.held_out_score()
    beginner.train(Budget(count=STEPS), lambda share, note: notes.append(note))
    losses = [float(re.search(r"cross entropy ([\d.]+)", note)[1]) for note in notes]  # type: ignore[index]
    assert losses[-1] < losses[0]
    found = Distillation(trained, RECIPE, target, "cpu").held_out_score()
    assert found.positions == untrained.positions > 100
    assert found.agreement > untrained.agreement + 0.1
    assert found.draft.tokens_per_round > untrained.draft.tokens_per_round


@pytest.mark.slow
def test_an_interrupted_training_ends_like_one_in_one_go(trained: Path, target: Path, tmp_path: Path) -> None:
    writing, training = Budget(count=SHARDS), Budget(count=STEPS)
    with pytest.raises(KeyboardInterrupt):
        Distillation(tmp_path, RECIPE, target, "cpu").run(
            writing, training, lambda name: stop_at(3) if name == "training" else quiet
        )
    assert not (tmp_path / "trained_layers.safetensors").exists()
    Distillation(tmp_path, RECIPE, target, "cpu").run(writing, training, lambda name: quiet)
    for name in ("trained_layers.safetensors", FILE_NAME):
        assert (tmp_path / name).read_bytes() == (trained / name).read_bytes()


def test_a_folder_keeps_its_recipe(written: Path, target: Path) -> None:
    with pytest.raises(ValueError, match=r"recipe.json: writing.seed was 3 when this folder was begun, is now 5"):
        Distillation(written, replace(RECIPE, writing=replace(WRITING, seed=5)), target, "cpu")


def test_the_assembled_draft_is_the_student(trained: Path, written: Path, target: Path) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(
        trained / "draft", dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.config.num_hidden_layers == 2
    # The draft is bfloat16, and so must be the part of the target that this compares with.
    kept = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).float()
    student = Student(kept, RECIPE.shape)
    student.start_from(trained / "trained_layers.safetensors")
    text = open_shards(written / "shards")[0].read(0, 4).token_ids.long()
    with torch.inference_mode():
        features = kept(text, output_hidden_states=True).hidden_states[1]
        expected = student(features) @ kept.get_output_embeddings().weight.T
        torch.testing.assert_close(model(text).logits, expected, atol=1e-4, rtol=1e-4)
    vocabulary = read_draft_vocabulary(trained / "draft", 259)
    assert vocabulary is not None
    assert 200 <= len(vocabulary) <= 203
    assert {256, 257, 258} <= set(vocabulary.tolist())
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (target, trained / "draft")]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()


def test_layers_of_another_shape_are_refused(trained: Path, target: Path) -> None:
    student = Student(AutoModelForCausalLM.from_pretrained(target), StudentShape(kept_layers=2, trained_layers=1))
    with pytest.raises(ValueError, match=r"does not fit layers model.layers.2"):
        student.start_from(trained / "trained_layers.safetensors")


def greedy(model: torch.nn.Module, allowed: torch.Tensor | None = None) -> Callable[[list[int]], int]:
    @torch.inference_mode()
    def following(tokens: list[int]) -> int:
        logits = model(torch.tensor([tokens])).logits[0, -1]
        return int(logits.argmax() if allowed is None else allowed[logits[allowed].argmax()])

    return following


@pytest.fixture
def questions(tmp_path: Path, target: Path) -> tuple[Path, Path]:
    """Prompts, and the target's greedy answers token by token, in the form that `spool generate` has."""
    tokenizer = ModelTokenizer(target)
    following = greedy(AutoModelForCausalLM.from_pretrained(target))
    prompts, answers = [], []
    for index, (text, category) in enumerate((("abc", "x"), ("What?", "y"), ("hello", "x"))):
        prompts.append({"question_id": 70 + index, "category": category, "turns": [text, "unused"]})
        tokens = tokenizer.encode_chat([{"role": "user", "content": text}])
        length = len(tokens)
        while len(tokens) < length + 25:
            tokens.append(following(tokens))
        answers.append({"index": index, "id": 70 + index, "tokens": tokens[length:]})
    files = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    for file, lines in zip(files, (prompts, answers), strict=True):
        file.write_text("\n".join(json.dumps(line) for line in lines))
    return files


def evaluate(*arguments: object) -> tuple[int, str, str]:
    outcome = CliRunner().invoke(command_line.app, ["evaluate", *map(str, arguments)])
    return outcome.exit_code, outcome.stdout, outcome.stderr


def test_evaluation_is_that_of_drafting_token_by_token(
    trained: Path, target: Path, questions: tuple[Path, Path], tmp_path: Path
) -> None:
    prompts, answers = questions
    asked = [json.loads(line) for line in prompts.read_text().splitlines()]
    draft = AutoModelForCausalLM.from_pretrained(trained / "draft")
    guess = greedy(draft, read_draft_vocabulary(trained / "draft", 259))
    tokenizer = ModelTokenizer(target)
    rounds, tokens, agreed = Counter[str](), Counter[str](), Counter[str]()
    for line in answers.read_text().splitlines():
        answer = json.loads(line)
        question = asked[answer["index"]]
        text = tokenizer.encode_chat([{"role": "user", "content": question["turns"][0]}])
        category, written = question["category"], answer["tokens"]
        agreed[category] += sum(guess(text + written[:place]) == token for place, token in enumerate(written))
        done = 1
        while done < len(written):
            proposal: list[int] = []
            while len(proposal) < 3:
                proposal.append(guess(text + written[:done] + proposal))
            accepted = 0
            while accepted < 3 and proposal[: accepted + 1] == written[done : done + accepted + 1]:
                accepted += 1
            committed = min(accepted + 1, len(written) - done)
            rounds[category] += 1
            tokens[category] += committed
            done += committed
    report = tmp_path / "report.json"
    code, output, errors = evaluate(
        "--draft", trained / "draft", "--prompts", prompts, "--answers", answers, "--draft-length", 3, "--lookup", 2,
        "--output", report, "--threads", 1,
    )  # fmt: skip
    assert code == 0, errors
    result = json.loads(output.splitlines()[-1])
    assert list(result["categories"]) == ["x", "y", "all"]
    for category in ("x", "y"):
        found = result["categories"][category]
        assert found["agreement"] == round(agreed[category] / found["positions"], 4)
        assert found["draft_tokens_per_round"] == round(tokens[category] / rounds[category], 4)
        assert found["combined_tokens_per_round"] >= 1
    assert "combined" in errors
    assert json.loads(report.read_text())["result"] == result


def test_a_target_as_its_own_draft_is_always_right(target: Path, questions: tuple[Path, Path]) -> None:
    prompts, answers = questions
    code, output, errors = evaluate("--draft", target, "--prompts", prompts, "--answers", answers, "--threads", 1)
    assert code == 0, errors
    overall = json.loads(output.splitlines()[-1])["categories"]["all"]
    # 24 tokens after the first, in rounds of five: four whole ones and one of four.
    assert overall == {"answers": 3, "positions": 75, "agreement": 1.0, "draft_tokens_per_round": 4.8}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "answers.jsonl:1: line: Invalid JSON"),
        ('{"index": 0}', "answers.jsonl:1: tokens: Field required"),
        ('{"index": 3, "tokens": [1]}', "index is 3, must be at least 0 and below 3 prompts"),
        ('{"index": 0, "tokens": []}', "tokens is empty"),
        ('{"index": 0, "id": 71, "tokens": [1]}', "id is 71, that of the prompt is 70"),
        ("", "holds no answers"),
    ],
)
def test_answers_that_cannot_be_used(target: Path, questions: tuple[Path, Path], line: str, message: str) -> None:
    prompts, answers = questions
    answers.write_text(line)
    code, _, errors = evaluate("--draft", target, "--prompts", prompts, "--answers", answers, "--threads", 1)
    assert code == 2
    assert message in errors


def test_a_folder_alone_means_make(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(command_line.app, [str(tmp_path), "--kept-layers", "-1"])
    assert outcome.exit_code == 2
    assert "error: kept_layers is -1, must be at least 0" in outcome.stderr
    outcome = CliRunner().invoke(command_line.app, [str(tmp_path), "--minutes-writing", "0"])
    assert "error: minutes is 0.0, must be above 0" in outcome.stderr
