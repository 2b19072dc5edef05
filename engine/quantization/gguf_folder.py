"""From a GGUF file to a model folder: configuration and tokenizer as files of Hugging Face's, the weights as they are.

No torch here: models are made ready by launchers.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from spool.engine.errors import UnsupportedModelError, one_line
from spool.engine.models.source import CHAT_TEMPLATE, GGUF_WEIGHTS, Progress, cache_folder
from spool.engine.quantization.gguf_architectures import ARCHITECTURES, Architecture
from spool.engine.quantization.gguf_file import GgufFile
from spool.engine.quantization.gguf_keys import sampling_defaults
from spool.engine.quantization.gguf_values import count, positive, shortest, wrong

# Raised when folders are made in another way, so that those of an older one are not used.
_RECIPE = 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
# Tokens by name that end an answer, whatever the header calls them.
_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "<end_of_turn>")
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_WORDS_BY_CASE = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*{_ENDINGS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS_BY_PRE = {
    **dict.fromkeys(
        ("chatglm-bpe", "dbrx", "glm4", "llama-bpe", "llama3", "smaug-bpe"), _WORDS.replace("DIGITS", "{1,3}")
    ),
    "qwen2": _WORDS.replace("DIGITS", ""),
    "gpt-4o": _WORDS_BY_CASE,
}
_DIGITS_ALONE = ("command-r", "refact", "smollm", "starcoder")
"""Those that cut digits off one by one, and the rest as GPT-2 does."""
PRES = (*_WORDS_BY_PRE, *_DIGITS_ALONE, "gpt-2")
"""Ways to cut a text into words that are known, by `tokenizer.ggml.pre`, of tokenizers of bytes."""
# After tokens of Phi-3 that mark turns, white space is left out; files do not say so. After these, it is not.
_KEEP_SPACES = ("<unk>", "<s>", "<|endoftext|>")
# By fields of transformers' configurations: linear layers that have biases where a file has some.
_BIASED = {
    "attention_bias": re.compile(r"blk\.\d+\.attn_(q|k|v|output)\.bias"),
    "attention_out_bias": re.compile(r"blk\.\d+\.attn_output\.bias"),
    "mlp_bias": re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.bias"),
    "use_bias": re.compile(r"blk\.\d+\.(attn|ffn)_(q|k|v|output|gate|up|down)\.bias"),
}
# Of Llama 3's scaling of rotary positions, alike in all its versions.
_LOW, _HIGH, _ORIGINAL_POSITIONS = 1.0, 4.0, 8192


def gguf_folder(path: Path, progress: Progress, template: Path | None = None) -> Path:
    """The folder of the model in the file at `path`, made in the cache folder where it is not there yet. The file
    `template` takes the place of the model's own chat template.

    It has links to the files, so its name tells files apart by their places too. Raises UnsupportedModelError.
    """
    progress(f"reading {path.name}", None)
    path = path.absolute()
    file = GgufFile(path)
    parts = [_RECIPE, path, path.stat().st_size, file.header_digest(), *([template.absolute()] if template else [])]
    digest = hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()
    root = cache_folder() / "gguf"
    folder = root / digest[:16]
    if folder.is_dir():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=root) as scratch:
            made = Path(scratch) / "model"
            made.mkdir()
            write_model_files(file, made)
            (made / GGUF_WEIGHTS).symlink_to(path)
            if template is not None:
                (made / CHAT_TEMPLATE).unlink(missing_ok=True)
                (made / CHAT_TEMPLATE).symlink_to(template.absolute())
            try:
                made.rename(folder)
            except OSError:
                # Another process was quicker.
                if not folder.is_dir():
                    raise
    except OSError as error:
        raise UnsupportedModelError(f"{path.name}: cannot write to {root}: {error.strerror}") from error
    return folder


def write_model_files(file: GgufFile, folder: Path) -> None:
    """All files of the model but the weights. Raises UnsupportedModelError."""
    config = model_config(file)
    tokenizer = model_tokenizer(file)
    ids = {name: config[f"{name}_token_id"] for name in ("bos", "eos", "pad")}
    ids["unk"] = _token_id(file, "tokenizer.ggml.unknown_token_id")
    named = {f"{name}_token": tokenizer.id_to_token(number) for name, number in ids.items() if number is not None}
    stated = [_token_id(file, f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
    ends = [ids["eos"], *stated, *map(tokenizer.token_to_id, _ENDS)]
    generation = {f"{name}_token_id": ids[name] for name in ("bos", "pad") if ids[name] is not None}
    generation["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None))
    for name, value in sampling_defaults(file).items():
        generation[name] = shortest(value) if isinstance(value, float) else value
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        **named,
    }
    contents = {"config.json": config, "generation_config.json": generation, "tokenizer_config.json": settings}
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        (folder / CHAT_TEMPLATE).write_text(template, encoding="utf-8")


def model_config(file: GgufFile) -> dict[str, Any]:
    """What transformers' config.json says of the model. Raises UnsupportedModelError."""
    kind = file.metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise wrong(file, "general.architecture", kind, f"one of {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[kind]
    hidden = count(file, f"{kind}.embedding_length")
    heads = count(file, f"{kind}.attention.head_count")
    head_dim = count(file, f"{kind}.attention.key_length", hidden // heads)
    if (values := count(file, f"{kind}.attention.value_length", head_dim)) != head_dim:
        raise wrong(file, f"{kind}.attention.value_length", values, f"{head_dim}, the size of a head")
    if "token_embd.weight" not in file.tensors:
        raise UnsupportedModelError(f"{file.path.name} holds no token_embd.weight")
    types = {tensor.type for tensor in file.tensors.values()} - {"F32"}
    epsilon, epsilon_key = architecture.epsilon
    config = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "dtype": "float32" if not types else architecture.half if types == {"F16"} else "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": count(file, f"{kind}.feed_forward_length"),
        "num_hidden_layers": count(file, f"{kind}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": count(file, f"{kind}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": count(file, f"{kind}.context_length"),
        epsilon: positive(file, f"{kind}.{epsilon_key}"),
        "rope_parameters": _rope(file, kind, head_dim) | _turned(file, kind, architecture, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "bos_token_id": _token_id(file, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _token_id(file, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _token_id(file, "tokenizer.ggml.padding_token_id"),
    }
    for field in architecture.biases:
        if (has := any(map(_BIASED[field].fullmatch, file.tensors))) or architecture.biased_unless_told:
            config[field] = has
    return config | architecture.fields(file, config)


def _turned(file: GgufFile, kind: str, architecture: Architecture, head_dim: int) -> dict[str, Any]:
    """Which share of a head positions turn, where that may be a part."""
    key = f"{kind}.rope.dimension_count"
    turned = count(file, key, head_dim)
    if turned == head_dim:
        return {"partial_rotary_factor": 1.0} if architecture.turns_part else {}
    # transformers cuts the product with the share down to a whole number.
    share = turned / head_dim
    if not architecture.turns_part or int(head_dim * share) != turned or turned > head_dim or turned % 2:
        limit = f"even and at most {head_dim}" if architecture.turns_part else f"{head_dim}"
        raise wrong(file, key, turned, f"{limit}, the size of a head")
    return {"partial_rotary_factor": share}


def _rope(file: GgufFile, kind: str, head_dim: int) -> dict[str, Any]:
    theta = positive(file, f"{kind}.rope.freq_base", 10_000.0)
    prefix = f"{kind}.rope.scaling."
    stated = {key.removeprefix(prefix) for key in file.metadata if key.startswith(prefix)} - {"finetuned"}
    factors = {
        key: positive(file, key) for key in (f"{prefix}factor", f"{kind}.rope.scale_linear") if key in file.metadata
    }
    scaling = file.metadata.get(f"{prefix}type", "linear" if factors else "none")
    if len(set(factors.values())) > 1:
        raise wrong(file, " and ".join(factors), factors, "equal")
    if "rope_freqs.weight" in file.tensors:
        if scaling != "none" and (scaling != "linear" or set(factors.values()) - {1.0}):
            raise wrong(file, f"{prefix}type", scaling, "none beside rope_freqs.weight")
        return {"rope_theta": theta, **_llama3_scaling(file, theta, head_dim)}
    if scaling == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    if scaling not in ("linear", "yarn") or not stated <= {"type", "factor", "original_context_length"}:
        raise wrong(file, f"{prefix}*", f"{scaling} ({', '.join(sorted(stated))})", "none, linear, or yarn by factor")
    if not factors:
        raise wrong(file, f"{prefix}factor", None, "a positive number")
    found: dict[str, Any] = {"rope_theta": theta, "rope_type": scaling, "factor": next(iter(factors.values()))}
    if scaling == "yarn":
        found["original_max_position_embeddings"] = count(file, f"{prefix}original_context_length")
    return found


def _llama3_scaling(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """The file has what each frequency is divided by, transformers has what that is computed from."""
    found = file.floats("rope_freqs.weight")
    factor = float(max(found))
    expected = []
    for pair in range(head_dim // 2 if len(found) == head_dim // 2 and factor > 0 else 0):
        turns = _ORIGINAL_POSITIONS * theta ** (-2 * pair / head_dim) / (2 * math.pi)
        share = min(max((turns - _LOW) / (_HIGH - _LOW), 0.0), 1.0)
        expected.append(1 / ((1 - share) / factor + share))
    if len(found) != len(expected) or not np.allclose(found, expected, rtol=1e-4):
        raise UnsupportedModelError(
            f"{file.path.name}: rope_freqs.weight holds other factors than Llama 3's scaling has"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL_POSITIONS,
    }


def model_tokenizer(file: GgufFile) -> Tokenizer:
    """With the ids that the file gives its tokens; those that only fill up the embedding are left out.

    Raises UnsupportedModelError.
    """
    tokens = _list(file, "tokenizer.ggml.tokens", str)
    types = _list(file, "tokenizer.ggml.token_type", int, [_NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise wrong(file, "tokenizer.ggml.token_type", f"{len(types)} numbers", f"{len(tokens)}, one for each token")
    rows = file.tensors["token_embd.weight"].shape[0]
    vocabulary: dict[str, int] = {}
    for number, token in enumerate(tokens):
        if types[number] == _UNUSED:
            continue
        field = f"tokenizer.ggml.tokens[{number}]"
        if token in vocabulary:
            raise wrong(file, field, token, f"another than tokens[{vocabulary[token]}]")
        if number >= rows:
            raise wrong(file, field, token, f"below {rows}, the rows of token_embd.weight")
        vocabulary[token] = number
    unknown = _token_id(file, "tokenizer.ggml.unknown_token_id")
    model = file.metadata.get("tokenizer.ggml.model")
    try:
        if model == "gpt2":
            tokenizer = _byte_level(file, vocabulary, None if unknown is None else tokens[unknown])
        elif model == "llama":
            tokenizer = _sentence_piece(file, vocabulary, types, None if unknown is None else tokens[unknown])
        else:
            raise wrong(file, "tokenizer.ggml.model", model, "gpt2 or llama")
        is_phi3 = model == "llama" and file.metadata.get("general.architecture") == "phi3"
        for number, token in enumerate(tokens):
            if types[number] in (_UNKNOWN, _CONTROL, _USER_DEFINED):
                special = types[number] != _USER_DEFINED
                rstrip = is_phi3 and token not in _KEEP_SPACES
                tokenizer.add_tokens([AddedToken(token, special=special, normalized=False, rstrip=rstrip)])
        begins = model == "llama" or file.metadata.get("tokenizer.ggml.pre") in ("llama-bpe", "llama3")
        around = [
            _token_id(file, f"tokenizer.ggml.{name}_token_id")
            if file.metadata.get(f"tokenizer.ggml.add_{name}_token", default)
            else None
            for name, default in (("bos", begins), ("eos", False))
        ]
        if around != [None, None]:
            first, last = ([] if number is None else [(tokens[number], number)] for number in around)
            template = [*(token for token, _ in first), "$A", *(token for token, _ in last)]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=" ".join(template), special_tokens=first + last
            )
    except UnsupportedModelError:
        raise
    except Exception as error:  # the library raises nothing more special
        raise UnsupportedModelError(f"{file.path.name}: its tokenizer cannot be made: {one_line(error)}") from error
    return tokenizer


def _byte_level(file: GgufFile, vocabulary: dict[str, int], unknown: str | None) -> Tokenizer:
    pre = file.metadata.get("tokenizer.ggml.pre")
    if pre not in PRES:
        raise wrong(file, "tokenizer.ggml.pre", pre, f"one of {', '.join(PRES)}")
    # A space is no letter of these tokens.
    merges = [tuple(merge.split(" ", 1)) for merge in _list(file, "tokenizer.ggml.merges", str)]
    words = _WORDS_BY_PRE.get(pre)
    tokenizer = Tokenizer(BPE(vocabulary, merges, unk_token=unknown, ignore_merges=pre in ("llama-bpe", "llama3")))
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
    digits = pre_tokenizers.Digits(individual_digits=True)
    split = pre_tokenizers.Split(Regex(words), behavior="isolated") if words else digits
    tokenizer.pre_tokenizer = bytes_of if pre == "gpt-2" else pre_tokenizers.Sequence([split, bytes_of])
    if pre in ("command-r", "qwen2"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(file: GgufFile, vocabulary: dict[str, int], types: list[int], unknown: str | None) -> Tokenizer:
    """Of Llama 2's kind: the piece of the best score is merged first, from whichever two pieces."""
    scores = _list(file, "tokenizer.ggml.scores", float)
    if len(scores) != len(types):
        raise wrong(file, "tokenizer.ggml.scores", f"{len(scores)} numbers", f"{len(types)}, one for each token")
    pieces = {token: scores[number] for token, number in vocabulary.items() if types[number] == _NORMAL}
    merges = [
        (score, token[:cut], token[cut:])
        for token, score in pieces.items()
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    merges.sort(key=lambda merge: merge[0], reverse=True)
    pairs = [(left, right) for _, left, right in merges]
    tokenizer = Tokenizer(BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaced = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend("▁")] if spaced else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    steps = [decoders.Strip(" ", 1, 0)] if spaced else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *steps]
    )
    return tokenizer


def _token_id(file: GgufFile, key: str) -> int | None:
    value = file.metadata.get(key)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    limit = len(tokens) if isinstance(tokens, list) else 0
    if value is not None and (not isinstance(value, int) or not 0 <= value < limit):
        raise wrong(file, key, value, f"below {limit}, the number of tokens")
    return value


def _list(file: GgufFile, key: str, kind: type, default: list[Any] | None = None) -> list[Any]:
    value = file.metadata.get(key, default)
    if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value):
        raise wrong(file, key, type(value).__name__, f"a list of {kind.__name__}")
    return value
