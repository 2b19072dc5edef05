"""Settings of a gateway, and sampling defaults that come with a model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from services.gateway.api_keys import ApiKeys
from services.gateway.errors import RequestError
from services.gateway.settings import GatewaySettings, NamedKey, SamplingDefaults, model_sampling_defaults


def test_safe_unless_changed() -> None:
    settings = GatewaySettings()
    assert settings.http.host == settings.grpc.host == "127.0.0.1"
    with pytest.raises(ValidationError, match="frozen"):
        settings.api_keys = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    "wrong",
    [
        {"api_keys": [""]},
        {"api_keys": ["with space"]},
        {"model_names": [""]},
        {"limits": {"sequences": 0}},
        {"sampling": {"temperature": float("nan")}},
        {"unknown": 1},
    ],
)
def test_wrong_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GatewaySettings.model_validate(wrong)


def test_keys_are_not_shown() -> None:
    settings = GatewaySettings(api_keys=(SecretStr("topsecret"),))
    assert "topsecret" not in repr(settings) + settings.model_dump_json()


SECRETS = {"team-a": b"tuesday", "team-b": b"wednesday"}


@pytest.mark.parametrize(
    ("shown", "known"),
    [
        (b"Bearer one", True),
        (b"bearer  two", True),
        (b"Bearer three", False),
        (b"Bearer one two", False),
        (b"one", False),
        (b"", False),
        (b"Bearer \xff", False),
        (None, False),
    ],
)
def test_keys(shown: bytes | None, known: bool) -> None:
    keys = ApiKeys([SecretStr("one"), SecretStr("two")])
    if known:
        keys.check(shown)
    else:
        with pytest.raises(RequestError):
            keys.check(shown)
    ApiKeys([]).check(shown)


def test_a_key_with_a_name_is_known_by_its_digest() -> None:
    named = [NamedKey(name=name, digest=hashlib.sha256(secret).hexdigest()) for name, secret in SECRETS.items()]
    keys = ApiKeys([SecretStr("one")], named)
    assert keys.check(b"Bearer one") == ""
    assert keys.check(b"Bearer tuesday") == "team-a"
    assert keys.check(b"bearer  wednesday ") == "team-b"
    for shown in (b"Bearer team-a", f"Bearer {named[0].digest}".encode(), b"Bearer thursday", None):
        with pytest.raises(RequestError):
            keys.check(shown)
    with pytest.raises(RequestError):
        ApiKeys([], named).check(None)
    assert GatewaySettings(named_keys=tuple(named)).keys_required


@pytest.mark.parametrize("digest", ["", "abc", "A" * 64, "0" * 63, "0" * 65])
def test_digests_have_one_form(digest: str) -> None:
    with pytest.raises(ValidationError, match="digest"):
        NamedKey(name="a", digest=digest)


def test_sampling_defaults_of_a_model(tmp_path: Path) -> None:
    assert model_sampling_defaults(tmp_path) == SamplingDefaults()
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"temperature": 0.6, "top_p": 0.95, "top_k": None, "eos_token_id": 7}), encoding="utf-8")
    assert model_sampling_defaults(tmp_path) == SamplingDefaults(temperature=0.6, top_p=0.95)
    for wrong in ("[]", "{", '{"temperature": -1}', '{"top_k": "many"}'):
        path.write_text(wrong, encoding="utf-8")
        with pytest.raises(ValueError, match=r"generation_config\.json"):
            model_sampling_defaults(tmp_path)
