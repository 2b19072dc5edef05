"""How long a text can be that a number of tokens stands for, so that a text that is too long need not be encoded."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

# Unicode's composed characters stand for up to four others.
_SHRINKING = {"NFC": 4, "NFD": 1, "ByteLevel": 1, "Prepend": 1}
_KEEP_ALL = ("ByteLevel", "Metaspace", "Digits", "Split", "Punctuation")


def most_characters_per_token(tokenizer: tokenizers.Tokenizer, vocabulary: Collection[str]) -> int | None:
    """None where a token may stand for any number of characters: the tokenizer drops some, or takes several unknown
    ones for one."""
    normalizers, splits = list(_steps(tokenizer.normalizer)), list(_steps(tokenizer.pre_tokenizer))
    bytelevel = any(step["type"] == "ByteLevel" for step in (*normalizers, *splits))
    bytes_ = pre_tokenizers.ByteLevel.alphabet() if bytelevel else [f"<0x{byte:02X}>" for byte in range(256)]
    model = tokenizer.model
    if not isinstance(model, models.BPE) or not (bytelevel or model.byte_fallback):
        return None
    # Where there is a token for unknown characters, each of them is one, unless several are fused.
    counts_unknown = model.unk_token is not None and not model.fuse_unk
    if not counts_unknown and any(token not in vocabulary for token in bytes_):
        return None
    # These take the white space around them.
    if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return None
    if any(step["type"] not in _KEEP_ALL or step.get("behavior") == "Removed" for step in splits):
        return None
    most = max(map(len, vocabulary))
    for step in normalizers:
        if step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or len(step["content"]) < len(pattern):
                return None
        elif step["type"] in _SHRINKING:
            most *= _SHRINKING[step["type"]]
        else:
            return None
    return most


def _steps(component: Any) -> Iterator[dict[str, Any]]:
    """A normalizer or a splitter as its parts, in the form of tokenizer.json."""
    if component is None:
        return
    waiting = [json.loads(component.__getstate__())]
    while waiting:
        step = waiting.pop()
        inner = step.get("normalizers", step.get("pretokenizers"))
        if inner is None:
            yield step
        else:
            waiting += inner
