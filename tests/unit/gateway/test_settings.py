"""Settings of a gateway, and sampling defaults that come with a model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from pydantic import SecretStr

from services.gateway.api_keys import ApiKeys
from services.gateway.errors import RequestError
from services.gateway.settings import NamedKey, SamplingDefaults, model_sampling_defaults

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
