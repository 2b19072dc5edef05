"""Receipts of what was decoded in batches, with drafts and without, computed again by `spool replay`."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from spool.engine.models.loading import load_draft_engine, load_target_engine
from spool.engine.replay import KnownOutput, replay
from spool.engine.settings import EngineSettings
from spool.engine.steps import StepOutcome, VerifyRow
from spool.scheduler.config import Policy, SchedulerConfig
from spool.scheduler.messages import SequenceRequest
from spool.scheduler.sampling import Grammar, SamplingParameters
from spool.services.gateway.grammar_check import definition
from spool.services.receipts.fingerprint import fingerprint_name
from spool.services.receipts.receipt import Receipt
from spool.services.worker.executor import StepExecutor
from tests.support.command_line import Ended, save_tokenizer, spool_here, write_lines
from tests.support.cpu_kernels import ISAS, compiled_kernels
from tests.support.in_process import Output, executor_of, run_in_process
from tests.support.tiny_models import TORCH_SHAPE, VOCABULARY, save_tiny_pair

ENDS = frozenset({7})
ENGINE: dict[str, Any] = {"threads": 1, "page_size": 16, "kv_pages": 200, "max_num_batched_tokens": 48}
SAMPLINGS = [
    SamplingParameters(),
    SamplingParameters(temperature=0.8, seed=1),
    SamplingParameters(temperature=1.2, seed=2, top_k=20, top_p=0.9, min_p=0.01),
    SamplingParameters(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    SamplingParameters(temperature=0.6, seed=2**64 - 1, logit_bias={5: 3.0, 9: -100}, bad_words=((4, 5), (6,))),
    SamplingParameters(temperature=1.0, seed=5, min_tokens=12, end_token_ids=ENDS, frequency_penalty=-0.2),
    SamplingParameters(temperature=0.9, seed=6, grammar=Grammar(definition("regex", "(ab?c){2,9}[0-9]{1,30}"), ENDS)),
    SamplingParameters(grammar=Grammar(definition("choice", '["yes", "yesterday", "no"]'), ENDS)),
]


@dataclass
class Served:
    folder: Path
    target: StepExecutor
    requests: list[SequenceRequest]
    outputs: dict[int, Output]

    def receipts(self) -> list[Receipt]:
        parts = self.target.engine.description.fingerprint  # type: ignore[attr-defined]
        found = []
        for request in self.requests:
            output = self.outputs[request.sequence_id]
            assert output.error is None
            tokens, digests = tuple(output.tokens), tuple(output.logits_digests)
            found.append(Receipt("tiny", parts, request.prompt, tokens, digests, request.sampling))
        return found


def serve(folder: Path, draft: Path | None, policy: Policy, **settings: Any) -> Served:
    """Prompts with a common beginning, which the prefix cache has, at every way of sampling."""
    engine = load_target_engine(EngineSettings(str(folder), **ENGINE, **settings), lambda *_: None)
    of_draft = EngineSettings(str(draft), **ENGINE, **settings)
    target = executor_of(engine, None if draft is None else load_draft_engine(of_draft, lambda *_: None))
    rng = random.Random(3)
    common = rng.choices(range(10, VOCABULARY), k=30)
    requests = [
        SequenceRequest(
            number,
            (*common[: 5 * number], *rng.choices(range(10, VOCABULARY), k=4 + 9 * (number % 4))),
            20 + number % 7,
            ENDS,
            SAMPLINGS[number % len(SAMPLINGS)],
            logits_digests=True,
            top_logprobs=0,
        )
        for number in range(2 * len(SAMPLINGS))
    ]
    length = 0 if draft is None else 4
    config = SchedulerConfig(batch_size=5, max_running=9, policy=policy, draft_length=length, prefill_chunk=13)
    return Served(folder, target, requests, run_in_process(config, {"target": target}, requests))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folders = save_tiny_pair("llama", tmp_path_factory.mktemp("models"))
    for folder in folders:
        save_tokenizer(folder)
    return folders


@pytest.fixture(scope="module")
def served(pair: tuple[Path, Path]) -> Served:
    return serve(*pair, Policy.RAGGED)


def replayed(folder: Path, scratch: Path, *receipts: Any, options: Sequence[str] = ()) -> Ended:
    file = write_lines(scratch / "receipts.jsonl", *receipts)
    return spool_here("replay", file, "--target", folder, "--json", "--logprobs", *options)


def test_what_was_decoded_with_drafts_is_computed_again_bit_by_bit(served: Served, tmp_path: Path) -> None:
    """Tokens, logits, and log probabilities, of the output and of prompt and output as a prompt."""
    assert sum(accepted for output in served.outputs.values() for _, accepted in output.rounds)
    receipts = served.receipts()
    ended = replayed(served.folder, tmp_path, *(receipt.to_json() for receipt in receipts))
    assert ended.code == 0, ended.err
    found = ended.summary["receipts"]
    assert [one["tokens"] for one in found] == [len(receipt.output) for receipt in receipts]
    outputs = [served.outputs[request.sequence_id] for request in served.requests]
    assert [one["logprobs"] for one in found] == [[entry.logprob for entry in each.logprobs] for each in outputs]
    free = [number for number, receipt in enumerate(receipts) if receipt.sampling.grammar is None]
    scored = [
        SequenceRequest(number, (*receipts[number].prompt, *receipts[number].output), 1, prompt_logprobs=0)
        for number in free
    ]
    again = run_in_process(SchedulerConfig(prefill_chunk=17), {"target": served.target}, scored)
    for number in free:
        count = len(receipts[number].output)
        assert [entry.logprob for entry in again[number].prompt_logprobs[-count:]] == found[number]["logprobs"]


def test_a_prompt_of_several_outputs_is_computed_once(served: Served) -> None:
    engine = load_target_engine(EngineSettings(str(served.folder), **ENGINE), lambda *_: None)
    computed = []

    class Counting:
        description, pool = engine.description, engine.pool

        def step(self, rows: list[VerifyRow]) -> StepOutcome:
            outcome = engine.step(rows)
            computed.append(outcome.timings.batched_tokens)
            return outcome

    prompt = served.requests[-1].prompt
    known = [KnownOutput(prompt, [1] * 30, SamplingParameters(seed=seed, temperature=1.0)) for seed in range(6)]
    found = [one for _, one in replay(Counting(), known)]  # type: ignore[arg-type]
    assert len({one.logits_digests[0] for one in found}) == 1 < len({one.tokens[0] for one in found})
    assert sum(computed) < 2 * len(prompt) + 6 * (30 + ENGINE["page_size"])


def test_without_drafts_the_receipts_are_the_same(served: Served, pair: tuple[Path, Path]) -> None:
    assert serve(pair[0], None, Policy.AUTO).receipts() == served.receipts()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {"quantization": "int8"}),
        ("gemma3_text", {"kv_cache_dtype": "int8"}),
        ("llama", {"dtype": "float32", "page_size": 32}),
    ],
    ids=str,
)
def test_of_other_models(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Where libraries compute, the replay takes the shapes of the receipt."""
    shape = TORCH_SHAPE if family == "llama" else {}
    folders = save_tiny_pair(family, tmp_path, **shape)
    for folder in folders:
        save_tokenizer(folder)
    given = {name: value for name, value in settings.items() if name not in ENGINE}
    sizes = {name: value for name, value in settings.items() if name in ENGINE}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.ENGINE", ENGINE | sizes)
        receipts = serve(*folders, Policy.RAGGED, **given).receipts()
    ended = replayed(folders[0], tmp_path, *(receipt.to_json() for receipt in receipts))
    assert ended.code == 0, ended.err


@pytest.mark.parametrize(
    ("number", "change", "place"),
    [
        (
            1,
            lambda one: replace(one, output=(*one.output[:4], one.output[4] ^ 1, *one.output[5:])),
            "output token 4 is",
        ),
        (1, lambda one: replace(one, prompt=(one.prompt[0] ^ 1, *one.prompt[1:])), "output token 0 is"),
        (0, lambda one: replace(one, logits_digests=(*one.logits_digests[:-1], 5)), "digest 0000000000000005"),
        (1, lambda one: replace(one, sampling=replace(one.sampling, seed=0)), "output token"),
        (1, lambda one: replace(one, sampling=replace(one.sampling, temperature=100)), "output token"),
        (3, lambda one: replace(one, sampling=replace(one.sampling, repetition_penalty=100)), "output token"),
        (7, lambda one: replace(one, sampling=replace(one.sampling, grammar=None)), "output token 0 is"),
        (0, lambda one: replace(one, fingerprint={**one.fingerprint, "torch": "1.0"}), "of this target: torch 1.0 and"),
        (0, lambda one: replace(one, fingerprint={**one.fingerprint, "kernels": "amx 5"}), "target: kernels amx 5 and"),
        (
            0,
            lambda one: replace(one, output=(one.output[0], 96, *one.output[2:])),
            "output_token_ids[1] is 96, must be",
        ),
        (0, lambda one: replace(one, prompt=(*one.prompt[1:], 96)), "prompt_token_ids["),
        (0, lambda one: replace(one, prompt=one.prompt * 200), "tokens, must have at most 512"),
    ],
    ids=range(12),
)
def test_what_whoever_changes_a_receipt_cannot_make_true_is_named(
    number: int, change: Callable[[Receipt], Receipt], place: str, served: Served, tmp_path: Path
) -> None:
    """All digests fit the change; only the target knows better."""
    receipts = served.receipts()
    others = [receipts[2].to_json(), receipts[5].to_json()]
    ended = replayed(served.folder, tmp_path, others[0], change(receipts[number]).to_json(), others[1])
    assert ended.code == 1, ended.err
    first, changed, last = ended.summary["receipts"]
    assert (first["equal"], last["equal"], changed["equal"]) == (True, True, False)
    assert place in changed["reason"]


def test_where_two_targets_part_is_said_as_transformers_sees_it(served: Served, tmp_path: Path) -> None:
    """For greedy outputs; with the other target's fingerprint alone."""
    folder = save_tiny_pair("llama", tmp_path, disagreement=0.04)[1]
    save_tokenizer(folder)
    receipts = served.receipts()
    theirs = [[entry.logprob for entry in served.outputs[one.sequence_id].logprobs] for one in served.requests]
    choices = [
        {
            "receipt": receipt.to_json(),
            "logprobs": {"tokens": ["", *map(str, logprobs)], "token_logprobs": [None, *logprobs]},
        }
        for receipt, logprobs in zip(receipts, theirs, strict=True)
    ]
    refused = replayed(folder, tmp_path, {"choices": choices}, options=("--against", f"fp_{16 * '0'}"))
    assert {one["parting"] for one in refused.summary["receipts"]} == {None}, refused.err
    name = fingerprint_name(receipts[0].fingerprint)
    ended = replayed(folder, tmp_path, {"choices": choices}, options=("--against", name))
    assert ended.code == 1, ended.err
    model = AutoModelForCausalLM.from_pretrained(folder)
    parted = 0
    for number, found in enumerate(ended.summary["receipts"]):
        prompt, output, parting = receipts[number].prompt, list(receipts[number].output), found["parting"]
        assert found["reason"].startswith(refused.summary["receipts"][number]["reason"])
        assert parting["logits"] == len(output)
        if receipts[number].sampling != SamplingParameters():
            continue
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
        logprobs, own = logits.log_softmax(1), logits.argmax(1).tolist()
        here = logprobs[range(len(output)), output].tolist()
        others = [place for place, token in enumerate(own) if token != output[place]]
        assert parting["tokens"] == len(others)
        largest = max(abs(one - other) for one, other in zip(theirs[number], here, strict=True))
        assert parting["largest_difference"] == pytest.approx(largest, abs=1e-3)
        for place in others[:1]:
            other, there = own[place], theirs[number][place]
            expected = {"place": place, "token": output[place], "there": there, "here": here[place], "other": other}
            assert parting["first"] == pytest.approx(expected | {"other_here": logprobs[place, other].item()}, abs=1e-3)
            parted += 1
    assert parted


def test_another_weight_is_another_target(served: Served, tmp_path: Path) -> None:
    folder = shutil.copytree(served.folder, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 4] += 2**-10
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    receipt = served.receipts()[1]
    ended = replayed(folder, tmp_path, receipt.to_json())
    assert ended.code == 1
    [found] = ended.summary["receipts"]
    own = receipt.fingerprint["weights"]
    assert found["reason"].startswith(f"fingerprint, in the receipt and of this target: weights {own} and ")


def test_the_text_of_an_answer_is_that_of_its_tokens(served: Served, tmp_path: Path) -> None:
    """In completions and chats, cut by a stop string, echoed, and in events of a stream; a changed letter is named, and
    so is text that is missing or cannot be compared."""
    tokenizer = AutoTokenizer.from_pretrained(served.folder)
    receipt = max(served.receipts(), key=lambda one: len(set(one.output)))
    text, prompt, last = (tokenizer.decode(ids) for ids in (receipt.output, receipt.prompt, receipt.output[-1:]))
    place = next(at for at in range(5, len(text)) if text[at].isalpha())
    changed = f"{text[:place]}{text[place].swapcase()}{text[place + 1 :]}"
    stop = text[-len(last) - 1 :]
    middle = text[4:9]
    wrong = f"goes on with {changed[place : place + 24]!r} at character {place}"
    odd = "text not compared: message.content is"

    def chat(**message: Any) -> dict[str, Any]:
        return {"message": {"role": "assistant", **message}, "finish_reason": "length"}

    def stopped(text: str, stop: str | int) -> dict[str, Any]:
        return {"text": text, "finish_reason": "stop", "stop_reason": stop}

    choices: list[tuple[dict[str, Any], str]] = [
        ({}, ""),
        ({"text": text, "finish_reason": "length"}, ""),
        ({"text": prompt + text, "finish_reason": "length"}, ""),
        (stopped(text.removesuffix(stop), stop), ""),
        (stopped(text, stop), ""),
        (chat(content=text, refusal=None, audio=None), ""),
        ({"text": text, "token_ids": list(receipt.output), "finish_reason": "length"}, ""),
        (chat(content=None, tool_calls=[{"function": {"name": "f", "arguments": "{}"}}]), ""),
        ({"text": changed, "finish_reason": "length"}, f"text {wrong}"),
        ({"text": prompt + changed, "finish_reason": "length"}, "text goes on"),
        ({"text": text[-3:], "finish_reason": "length"}, "text goes on"),
        (stopped(text[:4], text[3]), f"stop_reason is {text[3]!r}, which the last token is not"),
        (stopped(text.removesuffix(last), receipt.output[-1]), ""),
        (stopped(text.removesuffix(last), receipt.output[-1] + 1), "stop_reason is"),
        (stopped("", ""), "text not compared: stop_reason is '', must be a stop string"),
        (chat(content=changed), f"message.content {wrong}"),
        (chat(content=text[:-1]), f"message.content goes on with nothing at character {len(text) - 1}"),
        (chat(content=middle, reasoning=""), "message.content goes on"),
        (chat(content=text, reasoning=text), "message.reasoning goes on"),
        (chat(content=None), "message.content goes on with nothing at character 0"),
        (chat(content=[{"type": "text", "text": text}]), f"{odd} [{{"),
        (chat(content=123), f"{odd} 123, must be a text"),
        ({"text": 123}, "text not compared: text is 123, must be a text"),
        ({"text": None}, "text not compared: text is None, must be a text"),
        ({"message": None}, "text not compared: message is None, must be an object"),
        (chat(content=text, refusal="no"), "text not compared: message.refusal is 'no'"),
        (chat(content=text, audio="no"), "text not compared: message.audio is 'no'"),
        (chat(content=text, tool_calls=[{}]), "text not compared: tool_calls stand beside content"),
        ({"text": text, "token_ids": [5, *receipt.output[1:]]}, "token_ids are not the output_token_ids"),
    ]
    answers: list[dict[str, Any]] = [
        {"choices": [choice | {"receipt": receipt.to_json()}], "usage": usage}
        for usage in ({"total_tokens": 1}, None)
        for choice, _ in choices
    ]
    ended = replayed(served.folder, tmp_path, *answers)
    for found, (choice, reason) in zip(ended.summary["receipts"], 2 * choices, strict=True):
        assert (found["equal"], (found["reason"] or "").startswith(reason)) == (not reason, True), (choice, found)
    notes = [found["compared"] for found in ended.summary["receipts"]]
    assert (notes[0], notes[1], notes[7]) == ("", ", text", "; tool_calls not compared")

    def event(number: int, text: str, **more: Any) -> dict[str, Any]:
        return {"id": f"cmpl-{number}", "choices": [{"index": 0, "text": text, **more}]}

    end = {"finish_reason": "length", "receipt": receipt.to_json()}
    streams = [event(1, text[:4]), event(2, text[:3]), event(1, text[4:], **end), event(2, text[4:], **end)]
    ended = replayed(served.folder, tmp_path, *streams)
    assert [found["equal"] for found in ended.summary["receipts"]] == [True, False]


def test_log_probabilities_of_an_answer_are_compared(served: Served, tmp_path: Path) -> None:
    """Of completions, with an echo too, and of chats; values and the text of tokens."""
    tokenizer = AutoTokenizer.from_pretrained(served.folder)
    request = next(one for one in served.requests if one.sampling == SamplingParameters())
    receipt = served.receipts()[served.requests.index(request)]
    values = [entry.logprob for entry in served.outputs[request.sequence_id].logprobs]
    texts = [f"token_id:{token}" for token in receipt.output]
    other = [*values[:2], values[2] + 2**-20, *values[3:]]

    def completion(values: Sequence[float | None], tokens: Sequence[str] = texts) -> dict[str, Any]:
        return {"logprobs": {"tokens": tokens, "token_logprobs": values}}

    def chat(values: Sequence[float]) -> dict[str, Any]:
        pairs = zip(texts, values, strict=True)
        return {"logprobs": {"content": [{"token": token, "logprob": value} for token, value in pairs]}}

    echoed = [tokenizer.decode([token]) for token in receipt.prompt]
    choices = [
        (completion(values), ""),
        (completion([None] * len(echoed) + values, echoed + texts), ""),
        (chat(values), ""),
        (completion(other), "logprobs of output token 2 is"),
        (chat(other), "logprobs of output token 2 is"),
        (completion(values[1:], texts[1:]), f"logprobs has {len(values) - 1} tokens"),
        (completion(values, ["token_id:9999", *texts[1:]]), "logprobs of output token 0 is of 'token_id:9999'"),
    ]
    answers = [{"choices": [choice | {"receipt": receipt.to_json()}]} for choice, _ in choices]
    file = write_lines(tmp_path / "answers.jsonl", *answers)
    ended = spool_here("replay", file, "--target", served.folder, "--json")
    for found, (choice, reason) in zip(ended.summary["receipts"], choices, strict=True):
        assert (found["equal"], (found["reason"] or "").startswith(reason)) == (not reason, True), (choice, found)


@pytest.mark.slow
def test_a_model_with_tensors_that_may_be_left_out_decodes_and_is_replayed(served: Served, tmp_path: Path) -> None:
    """Commands are told which; replay finds them in the receipts."""
    folder = Path(shutil.copytree(served.folder, tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    more = {"extra.weight": torch.ones(2, 2), "other.0.weight": torch.ones(2, 2)}
    save_file(weights | more, folder / "model.safetensors", {"format": "pt"})
    ignored = ("extra.weight", "other.*")
    prompts = write_lines(tmp_path / "prompts.jsonl", {"prompt": "abc"})
    command = ("generate", folder, "--draft", "none", "--prompts", prompts, "--max-tokens", "3")
    refused = replayed(folder, tmp_path, served.receipts()[0].to_json())
    assert (refused.code, "--ignore-tensors" in refused.err) == (1, True), refused.err
    ended = spool_here(*command, "--json", *(each for name in ignored for each in ("--ignore-tensors", name)))
    assert ended.code == 0, ended.err
    engine = load_target_engine(EngineSettings(str(folder), **ENGINE, ignore_tensors=ignored), lambda *_: None)
    output = KnownOutput((5, 6, 7), (8,), SamplingParameters(), to_the_end=True)
    [(_, found)] = replay(engine, [output], None)
    tokens, digests = tuple(found.tokens), tuple(found.logits_digests)
    receipt = Receipt("tiny", engine.description.fingerprint, output.prompt, tokens, digests, SamplingParameters())
    ended = replayed(folder, tmp_path, receipt.to_json())
    assert (ended.code, [one["equal"] for one in ended.summary["receipts"]]) == (0, [True]), ended.err


def test_files_without_receipts_and_answers_with_some(served: Served, tmp_path: Path) -> None:
    one, two = (receipt.to_json() for receipt in served.receipts()[:2])
    answer = tmp_path / "answer.json"
    answer.write_text(json.dumps({"choices": [{"index": 0, "receipt": one}, {"index": 1, "receipt": two}]}, indent=1))
    ended = spool_here("replay", answer, "--target", served.folder)
    assert (ended.code, "2 of 2 receipts are equal" in ended.out) == (0, True), ended.err
    answer.write_text(json.dumps({"choices": [{"index": 0, "receipt": one}, {"index": 1, "text": "as you like"}]}))
    ended = spool_here("replay", answer, "--target", served.folder)
    assert (ended.code, "1 of 2 receipts are equal" in ended.out) == (1, True), ended.err
    assert "answer.json, receipt 2: the choice has no receipt" in ended.out
    damaged = one | {"output_token_ids": [1, *one["output_token_ids"][1:]]}
    refused = {"refused": "the targets are not alike"}
    # An answer as servers write it: U+2028 stands in its text as it is, and ends no line of JSON.
    served_line = json.dumps({"choices": [{"text": "\u2028", "receipt": damaged}]}, ensure_ascii=False)
    (tmp_path / "two.jsonl").write_text(f"{served_line}\n{json.dumps(refused)}\n")
    ended = spool_here("replay", tmp_path / "two.jsonl", "--target", "nowhere")
    assert ended.code == 1
    assert "two.jsonl, receipt 1: output_token_ids and digests.output do not fit each other" in ended.out
    assert "two.jsonl, receipt 2: there is no receipt: the targets are not alike" in ended.out
    for text, problem in (
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ('{"choices": []}', "holds no receipt"),
        ('{"choices": [{"text": "a"}]}', "holds no receipt"),
        ('{"choices": [{"receipt": {"version": 1, "version": 1}}]}', "has an object with 'version' twice"),
        ('{"choices": [3]}', "has choices that are no answer's"),
    ):
        answer.write_text(text)
        ended = spool_here("replay", answer)
        assert (ended.code, problem in ended.err) == (2, True), ended.err


@pytest.mark.parametrize(
    "isa", [pytest.param(isa, marks=pytest.mark.slow if isa == "portable" else []) for isa in ISAS]
)
def test_receipts_that_were_kept_are_equal_for_ever(isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of universal numerics, made in December 2026 with AVX-512. The version of llguidance alone may be another one: a
    change of anything else of their fingerprint breaks what was promised to those who keep receipts."""
    compiled_kernels()
    monkeypatch.setenv("SPOOL_CPU_ISA", isa)
    kept = Path(__file__).with_name("kept")
    receipts = [json.loads(line) for line in (kept / "receipts.jsonl").read_text().splitlines()]
    parts = receipts[0]["fingerprint"]
    ended = replayed(kept, tmp_path, *receipts, options=["--against", fingerprint_name(parts)])
    assert ended.code == 0, ended.err
    assert ended.summary["tokens"] == sum(len(receipt["output_token_ids"]) for receipt in receipts)
    here = load_target_engine(EngineSettings(str(kept), quantization="int4", **ENGINE), lambda *_: None)
    assert {**here.description.fingerprint, "llguidance": parts["llguidance"]} == parts
