"""Receipts: all that one output was sampled from, and what came out, so that it can be sampled again and compared
(docs/exactness.md).

In JSON, a receipt has a digest of each of its parts, by which a part that was changed is named, and perhaps a signature
of these digests. The digest of the logits is that of a chain: of each token, its row of logits and all before them. A
sampling parameter that is younger than the receipt is missing there, and in the digest, and has its default.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from typing import Any

from spool.scheduler.errors import SpoolError
from spool.scheduler.sampling import MAX_TOKEN_ID, Grammar, SamplingParameters
from spool.services.receipts.fingerprint import fingerprint_name
from spool.services.receipts.signing import ReceiptKey, check_signature

VERSION = 1
_HEXADECIMAL = re.compile("[0-9a-f]{16}")
_PARAMETERS = {one.name for one in fields(SamplingParameters)}
_FLOATS = {one.name for one in fields(SamplingParameters) if one.type == "float"}


class ReceiptError(SpoolError, ValueError):
    """A receipt is damaged, or does not say what it says it does; the message names the place, and can be encoded."""

    def __init__(self, message: str) -> None:
        super().__init__(message.encode("utf-8", "backslashreplace").decode())


@dataclass(frozen=True, slots=True)
class Receipt:
    """`fingerprint`: parts of that of the target; `logits_digests`: one for each token of the output."""

    model: str
    fingerprint: Mapping[str, str]
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    logits_digests: tuple[int, ...]
    sampling: SamplingParameters

    def to_json(self, key: ReceiptKey | None = None) -> dict[str, Any]:
        """Signed where there is a key."""
        sampling = _plain(self.sampling)
        digests = self._digests(sampling.keys())
        return {
            "version": VERSION,
            "model": self.model,
            "fingerprint": dict(self.fingerprint),
            "prompt_token_ids": list(self.prompt),
            "output_token_ids": list(self.output),
            "logits_digests": [f"{digest:016x}" for digest in self.logits_digests],
            "sampling": sampling,
            "digests": digests,
            "signature": None if key is None else key.sign(_signed(digests)),
        }

    @classmethod
    def from_json(cls, data: Any, public_key: str | None = None) -> Receipt:
        """Raises ReceiptError unless all parts fit their digests, and the signature, if there is one, fits these. With
        a `public_key` (64 hexadecimal digits) there must be one, of this key."""
        if data is None:
            raise ReceiptError("the choice has no receipt")
        if not isinstance(data, dict):
            raise ReceiptError("the receipt is no JSON object")
        if "refused" in data:
            raise ReceiptError(f"there is no receipt: {data['refused']}")
        if type(data.get("version")) is not int or data["version"] != VERSION:
            raise ReceiptError(f"version is {data.get('version')!r}, must be {VERSION}")
        receipt = cls(
            _text("model", data.get("model")),
            _fingerprint(data.get("fingerprint")),
            _tokens("prompt_token_ids", data),
            _tokens("output_token_ids", data),
            _logits_digests(data),
            _sampling(data.get("sampling")),
        )
        found, digests = data.get("digests"), receipt._digests(data["sampling"].keys())
        if not isinstance(found, dict) or found.keys() != digests.keys():
            raise ReceiptError(f"digests must be those of {', '.join(digests)}")
        for name, digest in digests.items():
            if found[name] != digest:
                raise ReceiptError(f"{_PLACES.get(name, name)} and digests.{name} do not fit each other")
        try:
            check_signature(data.get("signature"), _signed(digests), public_key)
        except ValueError as error:
            raise ReceiptError(str(error)) from error
        return receipt

    def difference(self, tokens: Sequence[int], logits_digests: Sequence[int]) -> str | None:
        """The first place where something else than in the receipt came out, as far as something did."""
        for place, (token, digest) in enumerate(zip(tokens, logits_digests, strict=True)):
            known = self.output[place], self.logits_digests[place]
            if known != (token, digest):
                return (
                    f"output token {place} is {known[0]} of logits with the digest {known[1]:016x} in the receipt, and "
                    f"{token} of logits with the digest {digest:016x} here"
                )
        return None

    def _digests(self, parameters: Set[str]) -> dict[str, str]:
        """`parameters`: the names of the sampling parameters that the receipt has."""
        sampling = _plain(self.sampling)
        seed, grammar = sampling.pop("seed"), sampling.pop("grammar")
        chain = b""
        for token, digest in zip(self.output, self.logits_digests, strict=True):
            chain = hashlib.sha256(chain + token.to_bytes(8, "big") + digest.to_bytes(8, "big")).digest()
        return {
            "model": _digest(self.model),
            "fingerprint": fingerprint_name(self.fingerprint),
            "prompt": _digest(self.prompt),
            "output": _digest(self.output),
            "logits": chain.hex(),
            "sampling": _digest({name: value for name, value in sampling.items() if name in parameters}),
            "seed": _digest(seed),
            "grammar": _digest(grammar),
        }


@dataclass(frozen=True, slots=True)
class FoundReceipt:
    """A receipt as JSON, and what came before and with it: the choice of an answer, or those of the events of a stream.
    `data` is None for a choice without a receipt. `logprobs` and `logprob_tokens`: of each token that has some."""

    data: Any
    choices: Sequence[Mapping[str, Any]] = ()
    logprobs: Sequence[float | None] = ()
    logprob_tokens: Sequence[str] = ()


def receipts_in(entries: Iterable[Any]) -> list[FoundReceipt]:
    """Of receipts themselves, of answers, and of streams, whose events have one id: of each choice, or of none.

    Raises AttributeError, KeyError, TypeError where something has choices that are no answer's.
    """
    found: list[FoundReceipt] = []
    begun: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or "choices" not in entry:
            found.append(FoundReceipt(entry))
            continue
        for choice in entry["choices"]:
            key = repr(entry.get("id", number)), repr(choice.get("index"))
            begun.setdefault(key, []).append(choice)
            # It is in the last event of a choice.
            if choice.get("receipt") is not None:
                found.append(_found(choice["receipt"], begun.pop(key)))
    return found + [_found(None, choices) for choices in begun.values()]


def _found(data: Any, choices: Sequence[Mapping[str, Any]]) -> FoundReceipt:
    entries = [entry for choice in choices for entry in _logprobs(choice.get("logprobs") or {})]
    for token, logprob in entries:
        if not isinstance(token, str) or not (logprob is None or isinstance(logprob, float | int)):
            raise TypeError(f"a log probability is {logprob!r} of {token!r}")
    return FoundReceipt(data, choices, [logprob for _, logprob in entries], [token for token, _ in entries])


def _logprobs(found: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """As completions and chats have them."""
    values = found.get("token_logprobs") or ()
    if len(values) != len(found.get("tokens") or ()):
        raise TypeError("logprobs has another number of tokens than of token_logprobs")
    chats = [(entry["token"], entry["logprob"]) for entry in found.get("content") or ()]
    return [*zip(found.get("tokens") or (), values, strict=True), *chats]


_PLACES = {
    "prompt": "prompt_token_ids",
    "output": "output_token_ids",
    "logits": "logits_digests",
    "seed": "sampling.seed",
    "grammar": "sampling.grammar",
}


def _plain(sampling: SamplingParameters) -> dict[str, Any]:
    """As JSON, in one form: numbers that may be fractions have a point, a seed is text, as not every reader of JSON
    keeps it exact, and what has no order is in order."""
    plain = {one.name: getattr(sampling, one.name) for one in fields(sampling)}
    grammar = sampling.grammar
    return plain | {
        **{name: float(plain[name]) for name in _FLOATS},
        "logit_bias": {str(token): float(value) for token, value in sorted(sampling.logit_bias.items())},
        "seed": str(sampling.seed),
        "end_token_ids": sorted(sampling.end_token_ids),
        "grammar": grammar and {"definition": grammar.definition, "end_token_ids": sorted(grammar.end_token_ids)},
        "bad_words": [list(word) for word in sampling.bad_words],
    }


def _sampling(found: Any) -> SamplingParameters:
    if not isinstance(found, dict):
        raise ReceiptError("sampling must be a JSON object")
    for name in found.keys() - _PARAMETERS:
        raise ReceiptError(f"sampling.{name} is not known; a newer version may have written the receipt")
    try:
        plain = _plain(SamplingParameters()) | found
        grammar = plain["grammar"]
        values = plain | {
            "logit_bias": {int(token): value for token, value in plain["logit_bias"].items()},
            "seed": int(plain["seed"]),
            "end_token_ids": frozenset(plain["end_token_ids"]),
            "grammar": grammar and Grammar(grammar["definition"], frozenset(grammar["end_token_ids"])),
            "bad_words": tuple(tuple(word) for word in plain["bad_words"]),
        }
        sampling = SamplingParameters(**values)
        alike = _plain(sampling) == plain
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ReceiptError(f"sampling cannot be read: {error}") from error
    if not alike:
        raise ReceiptError("sampling is not in the form that receipts have")
    return sampling


def _tokens(name: str, data: Mapping[str, Any]) -> tuple[int, ...]:
    found = data.get(name)
    if not isinstance(found, list) or not found:
        raise ReceiptError(f"{name} must be a list of token ids, one at least")
    for place, token in enumerate(found):
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            raise ReceiptError(f"{name}[{place}] is {token!r}, must be between 0 and {MAX_TOKEN_ID}")
    return tuple(found)


def _logits_digests(data: Mapping[str, Any]) -> tuple[int, ...]:
    found, count = data.get("logits_digests"), len(data["output_token_ids"])
    if not isinstance(found, list) or len(found) != count:
        raise ReceiptError(f"logits_digests must be a list of {count}, one for each token of the output")
    for place, digest in enumerate(found):
        if not isinstance(digest, str) or not _HEXADECIMAL.fullmatch(digest):
            raise ReceiptError(f"logits_digests[{place}] is {digest!r}, must be 16 hexadecimal digits")
    return tuple(int(digest, 16) for digest in found)


def _fingerprint(found: Any) -> Mapping[str, str]:
    if not isinstance(found, dict) or not all(isinstance(part, str) for part in found.values()):
        raise ReceiptError("fingerprint must have a text for each of its parts")
    return found


def _text(name: str, found: Any) -> str:
    if not isinstance(found, str):
        raise ReceiptError(f"{name} is {found!r}, must be a text")
    return found


def _digest(value: Any) -> str:
    return hashlib.sha256(_canonical(value)).hexdigest()


def _signed(digests: Mapping[str, str]) -> bytes:
    return _canonical({"version": VERSION, "digests": digests})


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
