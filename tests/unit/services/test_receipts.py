"""Receipts in JSON: what is changed is refused and named, whoever changed it."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from spool.scheduler.sampling import MAX_SEED, Grammar, SamplingParameters
from spool.services.receipts.receipt import Receipt, ReceiptError, receipts_in
from spool.services.receipts.signing import ReceiptKey
from tests.support.bits import each_changed_bit


def pem(key: Any) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


KEY = ReceiptKey(pem(Ed25519PrivateKey.generate()))
OTHER = ReceiptKey(pem(Ed25519PrivateKey.generate()))
SAMPLING = SamplingParameters(
    temperature=1,
    top_k=7,
    top_p=0.9,
    frequency_penalty=0.25,
    logit_bias={70000: -3, 5: 1.5},
    seed=MAX_SEED,
    min_tokens=1,
    end_token_ids=frozenset({9, 2}),
    grammar=Grammar("start: /a+/", frozenset({2})),
    bad_words=((4, 5), (6,)),
)
RECEIPT = Receipt("demo", {"weights": "aa", "dtype": "bfloat16"}, (3, 1), (4, 1, 5), (17, 2**64 - 1, 2), SAMPLING)


def changed(change: Callable[[dict[str, Any]], Any], receipt: Receipt = RECEIPT) -> dict[str, Any]:
    data = json.loads(json.dumps(receipt.to_json(KEY)))
    change(data)
    return data


@pytest.mark.parametrize("sampling", [SAMPLING, SamplingParameters()])
def test_it_is_read_as_it_was_written(sampling: SamplingParameters) -> None:
    receipt = Receipt("demo", {}, (3, 1), (4,), (17,), sampling)
    for key in (None, KEY):
        written = json.loads(json.dumps(receipt.to_json(key)))
        assert Receipt.from_json(written) == receipt
    # Readers of JSON in other languages do not tell 1.0 from 1.
    written["sampling"]["temperature"] = int(written["sampling"]["temperature"])
    assert Receipt.from_json(written, KEY.public) == receipt


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda data: data.update(version=2), "version is 2"),
        (lambda data: data["output_token_ids"].pop(), "logits_digests must be a list of 2"),
        (lambda data: data["output_token_ids"].__setitem__(0, -1), r"output_token_ids\[0\] is -1"),
        (lambda data: data["logits_digests"].__setitem__(1, "FFFFFFFFFFFFFFFF"), r"logits_digests\[1\]"),
        (lambda data: data["sampling"].update(end_token_ids=[9, 2]), "sampling is not in the form"),
        (lambda data: data["sampling"].update(top_p=2), "sampling cannot be read: top_p is 2"),
        (lambda data: data["sampling"].pop("min_p"), "sampling and digests.sampling do not fit each other"),
        (lambda data: data["sampling"].pop("top_k"), "sampling and digests.sampling do not fit each other"),
        (lambda data: data["sampling"].update(top_j=2), r"sampling\.top_j is not known"),
        (lambda data: data.update(sampling=[]), "sampling must be a JSON object"),
        (lambda data: data["digests"].pop("output"), "digests must be those of model, "),
        (lambda data: data["signature"].update(value=data["signature"]["value"].upper()), "signature.value"),
        (lambda data: data["signature"].update(public_key=OTHER.public), "signature.public_key is"),
        (lambda data: data["signature"].update(algorithm="RSA"), "signature.algorithm is 'RSA'"),
        (lambda data: data.update(signature=None), "signature is missing"),
        (lambda data: data.update(refused="the targets differ"), "there is no receipt: the targets differ"),
    ],
)
def test_a_change_of_form_is_refused_and_named(change: Callable[[dict[str, Any]], Any], place: str) -> None:
    with pytest.raises(ReceiptError, match=place):
        Receipt.from_json(changed(change), KEY.public)


RELEASED = [
    SamplingParameters(
        temperature=0.75,
        top_k=7,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={70000: -3, 5: 1.5},
        seed=MAX_SEED,
        min_tokens=1,
        end_token_ids=frozenset({9, 2}),
        grammar=Grammar("start: /a+/", frozenset({2})),
        bad_words=((4, 5), (6,)),
    ),
    SamplingParameters(),
]
"""Of the receipts of each release, which its own code wrote."""


@pytest.mark.parametrize(
    "release", sorted((Path(__file__).parent / "receipts").glob("*.jsonl")), ids=lambda path: path.stem
)
def test_receipts_of_every_release_are_read(release: Path) -> None:
    receipts = [json.loads(line) for line in release.read_text(encoding="utf-8").splitlines()]
    assert [Receipt.from_json(data).sampling for data in receipts] == RELEASED
    signer = receipts[0]["signature"]["public_key"]
    assert Receipt.from_json(receipts[0], signer).output == (4, 1, 5)


def test_a_parameter_that_is_younger_than_the_receipt_has_its_default() -> None:
    data = changed(lambda data: data.update(signature=None))
    for name, default in (("bad_words", ()), ("min_p", 0.0), ("top_p", 1.0)):
        del data["sampling"][name]
        digested = {name: value for name, value in data["sampling"].items() if name not in ("seed", "grammar")}
        canonical = json.dumps(digested, sort_keys=True, separators=(",", ":"))
        data["digests"]["sampling"] = hashlib.sha256(canonical.encode()).hexdigest()
        found = Receipt.from_json(data).sampling
        assert getattr(found, name) == default
        assert (found.top_k, found.seed, found.grammar) == (7, MAX_SEED, SAMPLING.grammar)


def test_one_bit_anywhere_is_refused_and_named() -> None:
    """In values and in names."""
    data = json.loads(json.dumps(RECEIPT.to_json(KEY)))
    for seed in range(30):
        for place in each_changed_bit(data, random.Random(seed)):
            with pytest.raises(ReceiptError, match=str(place[0])):
                Receipt.from_json(data, KEY.public)
    assert Receipt.from_json(data, KEY.public) == RECEIPT


def test_who_changes_all_digests_lacks_the_key() -> None:
    other = Receipt("demo", RECEIPT.fingerprint, (3, 1), (4, 1, 6), RECEIPT.logits_digests, SAMPLING)
    data = changed(lambda data: data.update(signature=RECEIPT.to_json(KEY)["signature"]), other)
    with pytest.raises(ReceiptError, match=r"signature\.value"):
        Receipt.from_json(data)
    with pytest.raises(ReceiptError, match=r"signature\.public_key is"):
        Receipt.from_json(other.to_json(OTHER), KEY.public)
    with pytest.raises(ReceiptError, match="signature is missing"):
        Receipt.from_json(other.to_json(), KEY.public)


def test_receipts_are_found_in_answers() -> None:
    completion = {"tokens": ["a", "b"], "token_logprobs": [-1.5, -2]}
    choices = [
        {"index": 0, "receipt": {"version": 1}, "logprobs": None},
        {"index": 1},
        {"index": 2, "receipt": {"refused": "so"}, "logprobs": completion},
        {"index": 3, "receipt": {"version": 2}, "logprobs": {"content": [{"token": "a", "logprob": -0.5}]}},
    ]
    stream = [
        {"id": "s", "choices": [{"index": 1, "text": "a"}, {"index": 0, "text": "b", "logprobs": completion}]},
        {"id": "s", "choices": [{"index": 0, "text": "c", "logprobs": completion, "receipt": {"version": 3}}]},
        {"id": "s", "choices": []},
    ]
    answers = receipts_in([{"id": "chatcmpl-1", "choices": choices}, *stream, {"version": 4}])
    assert [(answer.data, answer.logprobs) for answer in answers] == [
        ({"version": 1}, []),
        ({"refused": "so"}, [-1.5, -2]),
        ({"version": 2}, [-0.5]),
        ({"version": 3}, [-1.5, -2, -1.5, -2]),
        ({"version": 4}, ()),
        (None, []),
        (None, []),
    ]
    indices = [[choice["index"] for choice in answer.choices] for answer in answers]
    assert indices == [[0], [2], [3], [0, 0], [], [1], [1]]
    assert answers[3].logprob_tokens == ["a", "b", "a", "b"]


def test_a_version_is_a_whole_number() -> None:
    data = json.loads(json.dumps(RECEIPT.to_json()))
    for version in (True, 1.0, "1", None, 2):
        with pytest.raises(ReceiptError, match="version is"):
            Receipt.from_json(data | {"version": version})


def test_other_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="must be a private key in PEM"):
        ReceiptKey("nonsense")
    with pytest.raises(ValueError, match=r"is a EC.*, must be one of Ed25519"):
        ReceiptKey(pem(generate_private_key(SECP256R1())))
