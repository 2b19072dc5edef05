"""Model folders in forms that published models have, behind a gateway: tokens, texts and lengths are transformers'."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, OPTConfig, PreTrainedTokenizerFast

from spool.services.text.tokenizer import ModelTokenizer
from tests.integration.served.test_models import served
from tests.support.command_line import spool_here, write_lines
from tests.support.tiny_models import tiny_model
from tests.unit.services.test_tokenizer import byte_fallback

pytestmark = pytest.mark.slow

LETTER, BYTE, OTHER = "a", "<0x61>", "b"
"""The first two have the same text."""
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if pad_token is defined or pads %}{{ pad_token }}{% endif %}"
)
CHAT: list[Any] = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "b <more> b"}]
PROMPT = "<s>a b<more> b a</s>"


LENGTH, SCALED = 64, 256
"""Of the longest sequence, before YaRN and with it."""


def scale(folder: Path, name: str, kind: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    rope = {"rope_parameters": None, "rope_scaling": None, name: {kind: "yarn", "factor": 4.0, "rope_theta": 10000.0}}
    (folder / "config.json").write_text(json.dumps(config | rope))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In older forms: the special tokens stand in two files of their own, and YaRN's factor beside the length before
    scaling."""
    folder = tmp_path_factory.mktemp("older")
    model, tokenizer = tiny_model("llama", vocab_size=265, max_position_embeddings=LENGTH), byte_fallback()
    # One feature, always there, makes both likely, the letter more so.
    head, likely = model.get_output_embeddings().weight, [*map(tokenizer.token_to_id, (LETTER, BYTE))]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0
        model.get_input_embeddings().weight[:, 0] = 10
        head[likely] = 0
        head[likely, 0] = torch.tensor([9.0, 8.0])
    model.save_pretrained(folder)
    scale(folder, "rope_scaling", "type")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (folder / "added_tokens.json").write_text(json.dumps({"</s>": 263, "<s>": 262, "<more>": 264}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def theirs(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[openai.OpenAI]:
    with served(str(folder), str(folder), ModelTokenizer(folder), "float32", SCALED) as client:
        yield client


def certain(theirs: PreTrainedTokenizerFast, token: str) -> dict[str, Any]:
    """What makes every token of an answer this one."""
    return {"temperature": 0, "logit_bias": {str(theirs.convert_tokens_to_ids(token)): 100}}


def test_tokens_that_only_older_files_name(client: openai.OpenAI, theirs: PreTrainedTokenizerFast) -> None:
    [model] = client.models.list().data
    asked: dict[str, Any] = {"model": model.id, "max_tokens": 5, **certain(theirs, "</s>")}
    text = client.completions.create(prompt=PROMPT, **asked)
    chat = client.chat.completions.create(messages=CHAT, **asked)
    for done, ids in ((text, theirs(PROMPT)["input_ids"]), (chat, theirs.apply_chat_template(CHAT)["input_ids"])):
        assert done.usage is not None
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(ids), 1)
        assert done.choices[0].finish_reason == "stop"
    assert (text.choices[0].text, chat.choices[0].message.content) == ("", "")
    with pytest.raises(openai.BadRequestError, match="no file of the model says what pad_token is"):
        client.chat.completions.create(messages=CHAT, extra_body={"chat_template_kwargs": {"pads": True}}, **asked)


def likeliest(folder: Path, prompt: Sequence[int], answer: Sequence[int]) -> list[dict[int, float]]:
    """By transformers, of the twenty likeliest tokens at each place of an answer, the likeliest first."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    top = logits.log_softmax(-1).topk(20)
    return [dict(zip(*place, strict=True)) for place in zip(top.indices.tolist(), top.values.tolist(), strict=True)]


@pytest.mark.parametrize("sampled", [LETTER, BYTE, OTHER])
def test_each_of_two_tokens_with_one_text_has_its_own_log_probability(
    client: openai.OpenAI, theirs: PreTrainedTokenizerFast, folder: Path, sampled: str
) -> None:
    [model] = client.models.list().data
    letter, byte, token = theirs.convert_tokens_to_ids([LETTER, BYTE, sampled])
    asked: dict[str, Any] = {"model": model.id, "max_tokens": 20, **certain(theirs, sampled)}

    text = client.completions.create(prompt=PROMPT, logprobs=20, **asked).choices[0].logprobs
    assert text is not None
    right = likeliest(folder, theirs(PROMPT)["input_ids"], [token] * 20)
    # One entry for a text: the sampled token's, or else the likelier one's.
    shown = [top["a"] for top in text.top_logprobs or []]
    assert shown == pytest.approx([place[byte if sampled == BYTE else letter] for place in right], abs=1e-3)
    assert sampled == OTHER or shown == text.token_logprobs

    chat = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=20, **asked).choices[0].logprobs
    assert chat is not None
    right = likeliest(folder, theirs.apply_chat_template(CHAT)["input_ids"], [token] * 20)
    for entry, place in zip(chat.content or [], right, strict=True):
        equal = [one.logprob for one in entry.top_logprobs if one.token == "a"]
        assert equal == pytest.approx([place[letter], place[byte]], abs=1e-3)
        assert sampled == OTHER or entry.logprob == equal[[letter, byte].index(token)]


def test_yarn_takes_the_scaled_length(
    client: openai.OpenAI, theirs: PreTrainedTokenizerFast, folder: Path, tmp_path: Path
) -> None:
    [shown] = client.models.list().data
    asked: dict[str, Any] = {"model": shown.id, "max_tokens": 20, "temperature": 0}
    prompt = theirs("a b " * 60)["input_ids"]
    assert len(prompt) > LENGTH
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answer = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :].tolist()
    [choice] = client.completions.create(prompt=prompt, logprobs=0, **asked).choices
    assert choice.text == theirs.decode(answer)
    right = likeliest(folder, prompt, answer)
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == pytest.approx([max(place.values()) for place in right], abs=1e-3)
    with pytest.raises(openai.BadRequestError, match=f"the model's limit is {SCALED}"):
        client.completions.create(prompt=prompt * 2, **asked)

    copy = shutil.copytree(folder, tmp_path / "copy")
    prompts = write_lines(tmp_path / "prompts.jsonl", {"prompt": "b" * SCALED})
    for name, kind in (("rope_scaling", "type"), ("rope_parameters", "rope_type")):
        scale(copy, name, kind)
        for length, message in (
            (SCALED + 1, f"max_model_len is {SCALED + 1}, must be at most {SCALED}, the limit of {copy}"),
            (SCALED, f"tokens, the model takes {SCALED}"),
        ):
            refused = spool_here("generate", copy, "--prompts", prompts, "--max-model-len", length)
            assert (refused.code, message in refused.err) == (2, True), refused.err


def test_a_folder_without_tokenizer_json_is_served_once_converted(tmp_path: Path) -> None:
    """As OPT's are. The refusal says what converts it."""
    folder = tmp_path / "opt"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<pad>", "</s>", *letters, "th", "Ġth", "Ġthe"]
    sizes = {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 96, "num_hidden_layers": 2}
    ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    torch.manual_seed(0)
    config = OPTConfig(vocab_size=len(words), num_attention_heads=4, init_std=0.25, **sizes, **ids)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\nt h\nĠ th\nĠth e\n")
    named = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = AutoTokenizer.from_pretrained(folder)

    prompts = write_lines(tmp_path / "prompts.jsonl", {"prompt": "a"})
    refused = spool_here("generate", folder, "--prompts", prompts)
    assert refused.code == 2
    says, _, program = refused.err.partition("this makes one: ")
    assert f"{folder} holds no tokenizer.json" in says
    exec(program)

    with served(str(folder), str(folder), ModelTokenizer(folder), "float32") as client:
        [shown] = client.models.list().data
        for text in ("then</s> by the é", "😀 th", ""):
            prompt = theirs(text, return_tensors="pt")["input_ids"]
            done = client.completions.create(model=shown.id, prompt=text, max_tokens=20, temperature=0)
            answer = model.generate(prompt, max_new_tokens=20, do_sample=False)[0, prompt.shape[1] :]
            assert done.usage is not None
            assert done.usage.prompt_tokens == prompt.shape[1]
            assert done.choices[0].text == theirs.decode(answer, skip_special_tokens=True)
