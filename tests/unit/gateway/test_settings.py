"""Settings of a gateway, and sampling defaults that come with a model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from transformers import GenerationConfig

from spool.services.gateway.api_keys import ApiKeys
from spool.services.gateway.errors import RequestError
from spool.services.gateway.settings import NamedKey, SamplingDefaults, model_sampling_defaults, not_followed

SECRETS = {"team-a": b"tuesday", "team-b": b"wednesday"}


@pytest.mark.parametrize(
    ("shown", "name"),
    [
        (b"Bearer one", ""),
        (b"bearer  two", ""),
        (b"Bearer tuesday", "team-a"),
        (b"bearer  wednesday ", "team-b"),
        *((shown, None) for shown in (b"Bearer three", b"Bearer one two", b"one", b"", b"Bearer \xff")),
        (b"Bearer team-a", None),
        (b"Bearer " + hashlib.sha256(SECRETS["team-a"]).hexdigest().encode(), None),
    ],
)
def test_keys_are_known_by_themselves_or_by_their_digest(shown: bytes, name: str | None) -> None:
    named = [NamedKey(name=name, digest=hashlib.sha256(secret).hexdigest()) for name, secret in SECRETS.items()]
    keys = ApiKeys([SecretStr("one"), SecretStr("two")], named)
    if name is not None:
        assert keys.check(shown)[0] == name
    else:
        with pytest.raises(RequestError):
            keys.check(shown)
    with pytest.raises(RequestError, match="no API key was given"):
        keys.check()
    with pytest.raises(RequestError, match="given 2 times"):
        keys.check(b"Bearer one", shown)
    ApiKeys([]).check(shown)


def test_sampling_defaults_of_a_model(tmp_path: Path) -> None:
    assert model_sampling_defaults(tmp_path) == SamplingDefaults()
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"temperature": 0.6, "top_p": 0.95, "top_k": None, "eos_token_id": 7}), encoding="utf-8")
    assert model_sampling_defaults(tmp_path) == SamplingDefaults(temperature=0.6, top_p=0.95)
    for wrong in ("[]", "{", '{"temperature": -1}', '{"top_k": "many"}'):
        path.write_text(wrong, encoding="utf-8")
        with pytest.raises(ValueError, match=r"generation_config\.json"):
            model_sampling_defaults(tmp_path)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"no_repeat_ngram_size": 3, "num_beams": 4, "temperature": 0.5}, "no_repeat_ngram_size, num_beams"),
        ({"forced_bos_token_id": 0, "suppress_tokens": [1]}, "suppress_tokens, forced_bos_token_id"),
        ({"typical_p": 0.9, "eta_cutoff": 0.1}, "typical_p, eta_cutoff"),
    ],
)
def test_fields_of_a_model_that_are_not_followed_are_named(tmp_path: Path, config: dict[str, Any], named: str) -> None:
    assert not_followed(tmp_path) is None
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert not_followed(tmp_path) == (
        f"{tmp_path}/generation_config.json: {named}: not followed, so tokens may be others"
    )


def test_fields_of_a_model_that_change_nothing_are_not_named(tmp_path: Path) -> None:
    """As GenerationConfig writes them, and as it wrote them with the defaults of transformers 4."""
    idle = {"num_beams": 1, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "no_repeat_ngram_size": 0}
    idle |= {"encoder_repetition_penalty": 1.0, "length_penalty": 1.0, "min_length": 0, "token_healing": False}
    ids = {"do_sample": True, "eos_token_id": [1, 2], "pad_token_id": 0, "max_length": 20, "suppress_tokens": []}
    (tmp_path / "generation_config.json").write_text(json.dumps({**GenerationConfig().to_dict(), **idle, **ids}))
    assert not_followed(tmp_path) is None
