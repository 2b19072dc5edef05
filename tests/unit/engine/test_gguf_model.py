"""From GGUF files to what transformers has: parameters, configuration and tokenizer."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, CohereTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from spool.engine.errors import UnsupportedModelError
from spool.engine.exactness.fingerprint import folder_parts
from spool.engine.models.fetching import fetch_model
from spool.engine.models.memory_plan import model_memory
from spool.engine.models.source import ModelNotFoundError, resolve_model, weights_path
from spool.engine.quantization.gguf_architectures import ARCHITECTURES
from spool.engine.quantization.gguf_file import GgufFile
from spool.engine.quantization.gguf_folder import gguf_folder
from spool.engine.quantization.gguf_model import gguf_weights
from spool.engine.quantization.weights import QuantizedWeight
from spool.scheduler.messages import Role
from spool.services.gateway.settings import model_sampling_defaults
from spool.services.text.chat_template import ChatTemplateError
from spool.services.text.tokenizer import ModelTokenizer
from tests.support.gguf_models import ALWAYS_TIED, SHAPE, TOKENS, Change, shape_of, stated, write_model

KINDS = sorted({architecture.model_type for architecture in ARCHITECTURES.values()})
SILENT: Callable[[str, float | None], None] = lambda message, fraction: None  # noqa: E731


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPOOL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(("tied", "quantized"), [(False, True), (True, False)])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_configuration_are_those_of_the_model(
    kind: str, tied: bool, quantized: bool, tmp_path: Path
) -> None:
    path, tied = tmp_path / "small.gguf", tied or kind in ALWAYS_TIED
    parameters = write_model(path, kind, tied, quantized)
    folder = gguf_folder(path, SILENT)
    config = AutoConfig.from_pretrained(folder)
    assert config.tie_word_embeddings == tied
    wanted = shape_of(kind)
    assert {name: getattr(config, name) for name in wanted} == wanted | {
        "rope_parameters": config.rope_parameters | wanted["rope_parameters"]
    }
    assert config.dtype == (torch.bfloat16 if quantized else torch.float32)
    found = dict(gguf_weights(GgufFile(folder / "model.gguf"), config))
    assert found.keys() == parameters.keys()
    for name, expected in parameters.items():
        weight = found[name]
        assert isinstance(weight, QuantizedWeight) == (quantized and expected.dim() == 2 and "norm" not in name)
        assert torch.equal(weight.expanded() if isinstance(weight, QuantizedWeight) else weight, expected), name


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "llama", "phi3", "qwen2", "qwen3", "starcoder2"])
def test_transformers_own_reader_of_files_finds_the_same_model(kind: str, tmp_path: Path) -> None:
    """Of the architectures that it knows. What it leaves to defaults, heads and windows among it, is not compared."""
    write_model(
        tmp_path / "small.gguf",
        kind,
        tied=kind.startswith("gemma"),
        changes=[stated("tokenizer.ggml.padding_token_id", 0)],
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="small.gguf", dtype=torch.float32).state_dict()
    folder = gguf_folder(tmp_path / "small.gguf", SILENT)
    config = AutoConfig.from_pretrained(folder)
    ours = dict(gguf_weights(GgufFile(folder / "model.gguf"), config))
    assert ours.keys() == {name for name in theirs if name in ours or name != "lm_head.weight"}
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


def test_transformers_reads_the_folder(tmp_path: Path) -> None:
    write_model(tmp_path / "small.gguf", "llama")
    folder = gguf_folder(tmp_path / "small.gguf", SILENT)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "hi 123\t\u2581é<tool><|im_end|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.tokenize(text)[:5] == ["hi", "Ġ", "1", "2", "3"]
    assert tokenizer.tokenize(text)[-2:] == ["<tool>", "<|im_end|>"]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert "[PAD264]" not in tokenizer.get_vocab()
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False).startswith("[{")
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [TOKENS.index("<|im_end|>"), TOKENS.index("<|endoftext|>")]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "a 1234's", ["a", "Ġ", "1", "2", "3", "4", "'s"]),
        ("gpt-2", "a 1234's", ["a", "Ġ1234", "'s"]),
        ("refact", "a 12's", ["a", "Ġ", "1", "2", "'s"]),
        ("starcoder", "a 12's", ["a", "Ġ", "1", "2", "'s"]),
        ("command-r", "a 12's", ["a", "Ġ", "1", "2", "'s"]),
        ("dbrx", "a 1234'S  b\n", ["a", "Ġ", "123", "4", "'S", "Ġ", "Ġb", "Ċ"]),
        ("glm4", "a 1234'S  b\n", ["a", "Ġ", "123", "4", "'S", "Ġ", "Ġb", "Ċ"]),
        ("smaug-bpe", "a 1234'S  b\n", ["a", "Ġ", "123", "4", "'S", "Ġ", "Ġb", "Ċ"]),
        (
            "gpt-4o",
            "camelCase HTTPs 1234 we'LL a/\n",
            [
                *("camel", "Case", "ĠHTTPs", "Ġ", "123", "4", "Ġwe'LL", "Ġa", "/Ċ"),
            ],
        ),
        ("qwen2", "a 1234's  b\n", ["a", "Ġ", "1", "2", "3", "4", "'s", "Ġ", "Ġb", "Ċ"]),
        ("llama-bpe", "a 1234'S  b\n", ["a", "Ġ", "123", "4", "'S", "Ġ", "Ġb", "Ċ"]),
    ],
)
def test_text_is_split_as_the_name_of_the_pre_tokenizer_says(
    pre: str, text: str, pieces: list[str], tmp_path: Path
) -> None:
    write_model(tmp_path / "small.gguf", "llama", pre=pre)
    folder = gguf_folder(tmp_path / "small.gguf", SILENT)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces
    first = [TOKENS.index("<|im_start|>")] if pre == "llama-bpe" else []
    assert tokenizer.encode("hi").ids == [*first, TOKENS.index("hi")]


def test_qwen2_texts_have_the_tokens_that_transformers_gives_them(tmp_path: Path) -> None:
    write_model(tmp_path / "small.gguf", "qwen2", pre="qwen2")
    ours = AutoTokenizer.from_pretrained(gguf_folder(tmp_path / "small.gguf", SILENT))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="small.gguf")
    for text in ("hi hi 12345 don't\n\n  x", "e\u0301 日本 🙂", "<|im_start|>hi<|im_end|>"):
        assert ours(text).input_ids == theirs(text).input_ids


def sentence_pieces(writer: gguf.GGUFWriter) -> None:
    for key in ("model", "tokens", "token_type", "bos_token_id", "eos_token_id"):
        del writer.kv_data[0][f"tokenizer.ggml.{key}"]
    letters, merged = [*"▁abc"], {"ab": -2.0, "▁ab": -3.0, "bc": -1.0}
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *merged])
    writer.add_token_scores([0.0] * 259 + [-9.0] * 4 + list(merged.values()))
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * 7)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def test_pieces_are_merged_by_their_scores(tmp_path: Path) -> None:
    write_model(tmp_path / "small.gguf", "llama", changes=[sentence_pieces])
    tokenizer = AutoTokenizer.from_pretrained(gguf_folder(tmp_path / "small.gguf", SILENT))
    assert tokenizer.tokenize("ab abc") == ["▁ab", "▁", "a", "bc"]
    assert tokenizer("é").input_ids == [1, tokenizer.convert_tokens_to_ids("▁"), 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode(tokenizer("ab é  c").input_ids, skip_special_tokens=True) == "ab é  c"


def test_phi3_leaves_out_white_space_behind_its_marks(tmp_path: Path) -> None:
    """As the published tokenizer does, and llama.cpp by the model's name; no key says it."""
    write_model(tmp_path / "small.gguf", "phi3", changes=[sentence_pieces])
    tokenizer = AutoTokenizer.from_pretrained(gguf_folder(tmp_path / "small.gguf", SILENT))
    for text, pieces in (("</s> \n ab", ["</s>", "▁ab"]), ("<s> ab", ["<s>", "▁", "▁ab"])):
        found = tokenizer(text, add_special_tokens=False).input_ids
        assert found == tokenizer.convert_tokens_to_ids(pieces)


def test_cohere_texts_are_normalized_as_transformers_does(tmp_path: Path) -> None:
    write_model(tmp_path / "small.gguf", "cohere", True, pre="command-r")
    ours = AutoTokenizer.from_pretrained(gguf_folder(tmp_path / "small.gguf", SILENT))
    theirs = CohereTokenizer().backend_tokenizer
    for text in ("hi 12 don't\n\n  x", "e\u0301 日本 🙂 ½"):
        normal = theirs.normalizer.normalize_str(text)
        assert ours.backend_tokenizer.normalizer.normalize_str(text) == normal
        found, expected = (one.pre_tokenizer.pre_tokenize_str(normal) for one in (ours.backend_tokenizer, theirs))
        assert found == expected


def rope_factors(config: dict[str, Any], theta: float = 500_000.0) -> np.ndarray:
    """What llama.cpp divides frequencies by, from those that transformers has."""
    rope = AutoConfig.for_model("llama", **SHAPE | {"rope_parameters": config | {"rope_theta": theta}})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](rope, torch.device("cpu"))
    plain = theta ** (-torch.arange(0, SHAPE["head_dim"], 2) / SHAPE["head_dim"])
    return (plain / scaled).numpy().astype(np.float32)


LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)


def llama3(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", rope_factors(LLAMA3))


@pytest.mark.parametrize(
    ("change", "expected"),
    [(llama3, LLAMA3), (yarn, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32})],
)
def test_scaled_rotary_positions_are_told(change: Change, expected: dict[str, Any], tmp_path: Path) -> None:
    assert len(set(rope_factors(LLAMA3))) > 2
    parameters = write_model(tmp_path / "small.gguf", "llama", changes=[change])
    folder = gguf_folder(tmp_path / "small.gguf", SILENT)
    config = AutoConfig.from_pretrained(folder)
    assert config.rope_parameters == expected | {"rope_theta": 500_000.0}
    assert dict(gguf_weights(GgufFile(folder / "model.gguf"), config)).keys() == parameters.keys()


def more_tokens(writer: gguf.GGUFWriter) -> None:
    stated("tokenizer.ggml.tokens", TOKENS + [f"<more {number}>" for number in range(30)])(writer)
    stated("tokenizer.ggml.token_type", [*writer.kv_data[0]["tokenizer.ggml.token_type"].value, *[1] * 30])(writer)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            stated("general.architecture", "bloom"),
            "general.architecture is 'bloom', must be one of arcee, cohere2, command-r, ernie4_5, gemma, gemma2",
        ),
        (stated("llama.block_count", "two"), "llama.block_count is 'two'"),
        (stated("llama.rope.dimension_count", 8), "llama.rope.dimension_count is 8, must be 16"),
        (stated("llama.rope.scaling.type", "longrope"), "llama.rope.scaling.* is 'longrope"),
        (stated("tokenizer.ggml.model", "bert"), "tokenizer.ggml.model is 'bert', must be gpt2 or llama"),
        (stated("tokenizer.ggml.pre", "tekken"), "tokenizer.ggml.pre is 'tekken', must be one of"),
        (stated("tokenizer.ggml.merges", ["no pair here"]), "its tokenizer cannot be made"),
        (
            stated("tokenizer.ggml.tokens", ["a"] * 265),
            "tokenizer.ggml.tokens[1] is 'a', must be another than tokens[0]",
        ),
        (stated("tokenizer.ggml.token_type", [1] * 9), "tokenizer.ggml.token_type is '9 numbers', must be 265"),
        (more_tokens, "tokenizer.ggml.tokens[288] is '<more 23>', must be below 288, the rows of token_embd.weight"),
        (stated("tokenizer.ggml.eos_token_id", 999), "tokenizer.ggml.eos_token_id is 999, must be below 265"),
        (
            lambda writer: writer.add_tensor("rope_freqs.weight", np.full(8, 3, np.float32)),
            "rope_freqs.weight holds other",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(change: Change, said: str, tmp_path: Path, cache: Path) -> None:
    write_model(tmp_path / "small.gguf", "llama", changes=[change])
    with pytest.raises(UnsupportedModelError) as caught:
        gguf_folder(tmp_path / "small.gguf", SILENT)
    assert str(caught.value).startswith("small.gguf: ")
    assert said in str(caught.value)
    assert list((cache / "gguf").iterdir()) == []


def test_fillers_of_the_embedding_may_have_the_same_name(tmp_path: Path) -> None:
    fillers = [stated("tokenizer.ggml.tokens", [*TOKENS, *["[PAD]"] * 30])]
    fillers.append(stated("tokenizer.ggml.token_type", [1] * (len(TOKENS) - 1) + [5] * 31))
    write_model(tmp_path / "small.gguf", "llama", changes=fillers)
    tokenizer = Tokenizer.from_file(str(gguf_folder(tmp_path / "small.gguf", SILENT) / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == len(TOKENS) - 1


@pytest.mark.parametrize(("begins", "ends"), [(True, True), (False, True), (True, False), (False, False)])
def test_tokens_around_a_text_are_those_that_the_file_asks_for(begins: bool, ends: bool, tmp_path: Path) -> None:
    asked = [stated("tokenizer.ggml.add_bos_token", begins), stated("tokenizer.ggml.add_eos_token", ends)]
    write_model(tmp_path / "small.gguf", "llama", changes=asked)
    tokenizer = Tokenizer.from_file(str(gguf_folder(tmp_path / "small.gguf", SILENT) / "tokenizer.json"))
    first, last = ["<|im_start|>"] * begins, ["<|im_end|>"] * ends
    assert tokenizer.encode("hi").tokens == [*first, "hi", *last]


def test_sampling_and_ends_of_the_file_become_the_model_s_defaults(tmp_path: Path) -> None:
    sampling = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.1}
    changes = [stated(f"general.sampling.{name}", value) for name, value in sampling.items()]
    changes.append(stated("tokenizer.ggml.eom_token_id", TOKENS.index("<tool>")))
    write_model(tmp_path / "small.gguf", "llama", changes=changes)
    folder = gguf_folder(tmp_path / "small.gguf", SILENT)
    defaults = model_sampling_defaults(folder)
    found = (defaults.temperature, defaults.top_k, defaults.top_p, defaults.min_p, defaults.repetition_penalty)
    assert found == tuple(sampling.values())
    assert TOKENS.index("<tool>") in json.loads((folder / "generation_config.json").read_text())["eos_token_id"]


def in_parts(tmp_path: Path) -> list[Path]:
    write_model(tmp_path / "small.gguf", "llama", part_tensors=7)
    return sorted(tmp_path.glob("small-*.gguf"))


def test_a_file_in_parts_is_that_of_one(tmp_path: Path) -> None:
    parameters = write_model(tmp_path / "one.gguf", "llama")
    first, *others = in_parts(tmp_path)
    folder = gguf_folder(first, SILENT)
    config = AutoConfig.from_pretrained(folder)
    assert not config.tie_word_embeddings
    found = dict(gguf_weights(GgufFile(weights_path(folder)), config))
    assert found.keys() == parameters.keys()
    assert all(torch.equal(found[name], expected) for name, expected in parameters.items())
    one = gguf_folder(tmp_path / "one.gguf", SILENT)
    assert model_memory("target", folder, "auto", 64).weights == model_memory("target", one, "auto", 64).weights
    whole = folder_parts(folder)
    content = others[-1].read_bytes()
    others[-1].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert folder_parts(folder)["weights"] != whole["weights"]


def rename(number: int, name: str) -> Callable[[list[Path]], Path]:
    def change(parts: list[Path]) -> Path:
        moved = parts[number].rename(parts[number].with_name(name))
        return moved if number == 0 else parts[0]

    return change


def lose(parts: list[Path]) -> Path:
    parts[1].unlink()
    return parts[0]


def repeat(parts: list[Path]) -> Path:
    parts[2].write_bytes(parts[1].read_bytes())
    return parts[0]


def count(parts: list[Path]) -> Path:
    content = bytearray(parts[0].read_bytes())
    at = content.index(b"split.tensors.count") + len(b"split.tensors.count") + 4
    content[at : at + 4] = struct.pack("<i", 20)
    parts[0].write_bytes(content)
    return parts[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda parts: parts[1],
            "small-00002-of-00003.gguf: split.no is 1, must be 0: models in parts are",
        ),
        (lose, "small-00001-of-00003.gguf is one of 3 parts, of which small-00002-of-00003.gguf is not in its folder"),
        (repeat, "small-00003-of-00003.gguf: split.no is 1, must be 2"),
        (count, "small-00002-of-00003.gguf: split.tensors.count is 21, must be 20, as in small-00001-of-00003.gguf"),
        (rename(0, "small.gguf"), "small.gguf has 3 parts by its split.count, must be named NAME-00001-of-00003.gguf"),
        (rename(0, "small-00001-of-00002.gguf"), "small-00001-of-00002.gguf has 3 parts by its split.count"),
        (rename(2, "other.gguf"), "of which small-00003-of-00003.gguf is not in its folder"),
    ],
)
def test_parts_that_are_not_all_there_are_refused(
    change: Callable[[list[Path]], Path], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        gguf_folder(change(in_parts(tmp_path)), SILENT)
    assert said in str(caught.value)


def test_a_whole_of_other_parts_is_refused(tmp_path: Path) -> None:
    first, *others = in_parts(tmp_path)
    for part in (first, *others):
        content = bytearray(part.read_bytes())
        at = content.index(b"split.tensors.count") + len(b"split.tensors.count") + 4
        content[at : at + 4] = struct.pack("<i", 20)
        part.write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=r"split\.tensors\.count is 20, must be 21, the number of tensors"):
        gguf_folder(first, SILENT)


def test_a_tensor_of_another_model_is_refused(tmp_path: Path) -> None:
    extra: Change = lambda writer: writer.add_tensor("blk.0.ffn_gate_exps.weight", np.ones(4, np.float32))  # noqa: E731
    write_model(tmp_path / "small.gguf", "llama", changes=[extra])
    folder = gguf_folder(tmp_path / "small.gguf", SILENT)
    config = AutoConfig.from_pretrained(folder)
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.ffn_gate_exps\.weight"):
        list(gguf_weights(GgufFile(folder / "model.gguf"), config))
    with pytest.raises(UnsupportedModelError, match=r"type bloom, must be one of arcee, cohere, cohere2, ernie4_5, "):
        next(gguf_weights(GgufFile(folder / "model.gguf"), AutoConfig.for_model("bloom")))


def test_a_file_by_its_name_is_a_model(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = write_model(tmp_path / "small.gguf", "llama")
    monkeypatch.chdir(tmp_path)
    folder = fetch_model(resolve_model("small.gguf", Role.TARGET), SILENT)
    assert folder.parent == cache / "gguf"
    assert fetch_model(resolve_model("small.gguf", Role.DRAFT), SILENT) == folder
    assert resolve_model(str(folder), Role.TARGET).folder == folder
    (tmp_path / "other.gguf").write_bytes((tmp_path / "small.gguf").read_bytes())
    assert fetch_model(resolve_model("other.gguf", Role.TARGET), SILENT) != folder
    taken = model_memory("target", folder, "auto", 64).weights
    assert taken == sum(4 * parameter.numel() for parameter in parameters.values())
    with pytest.raises(ModelNotFoundError, match=r"gone\.gguf: no such file"):
        resolve_model("gone.gguf", Role.TARGET)


def test_a_folder_with_one_file_and_a_chat_template_is_a_model(tmp_path: Path) -> None:
    beside = tmp_path / "model"
    beside.mkdir()
    write_model(beside / "small.gguf", "llama", changes=[lambda writer: writer.add_chat_template("{{ broken")])
    alone = fetch_model(resolve_model(str(beside), Role.TARGET), SILENT)
    with pytest.raises(ChatTemplateError):
        ModelTokenizer(alone).chat_template()
    (beside / "chat_template.jinja").write_text("{{ tools }}: {{ messages[0].content }}")
    folder = fetch_model(resolve_model(f"{beside}/", Role.TARGET), SILENT)
    template = ModelTokenizer(folder).chat_template(with_tools=True)
    assert (template.takes_tools, template.render([{"content": "a"}], tools=[])) == (True, "[]: a")
    assert folder != alone
    assert fetch_model(resolve_model(str(beside / "small.gguf"), Role.TARGET), SILENT) == alone
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (folder / name).read_bytes() == (alone / name).read_bytes()
    # The text is that of the file whenever it is read.
    (beside / "chat_template.jinja").write_text("b")
    assert fetch_model(resolve_model(str(beside), Role.TARGET), SILENT) == folder
    assert ModelTokenizer(folder).render_chat([{"content": "a"}]) == "b"
    for other, message in (
        ("tokenizer.json", r"holds tokenizer\.json, which is not read beside a GGUF file: name .*small\.gguf"),
        ("another.gguf", r"holds 2 GGUF files, name one: another\.gguf, small\.gguf"),
    ):
        (beside / other).touch()
        with pytest.raises(ModelNotFoundError, match=message):
            resolve_model(str(beside), Role.TARGET)
