"""Settings of a gateway: what the gateway serves, to whom, and within which limits."""

from __future__ import annotations

import ipaddress
import json
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr

from spool.services.gateway.answers.formats import ToolFormat

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# Processes have other working directories than the one who names a file.
NodeFile = Annotated[Path, AfterValidator(Path.absolute)]

_GENERATION = "generation_config.json"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class TlsFiles(_Frozen):
    """Our own certificate and key: PEM files on every node."""

    certificate: NodeFile
    """Certificate, with the intermediate certificates, in PEM."""
    key: NodeFile
    """Private key of the certificate, in PEM."""


class ListenSettings(_Frozen):
    """Where a server listens."""

    host: str = "127.0.0.1"
    """Address or name of the interface; only this machine unless changed."""
    port: Port = 0
    """0: any free port."""
    tls: TlsFiles | None = None
    """Unset: connections are not encrypted."""


class SamplingDefaults(_Frozen):
    """Sampling values for requests that name none: OpenAI's, unless the model's author gives others."""

    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Keeps the likeliest tokens that together have this probability; 1 keeps all, 0 is greedy."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Keeps this many likeliest tokens; 0 keeps all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Keeps tokens at least this likely, as a fraction of the likeliest one's probability; 0 keeps all."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] = 1.0
    """Above 1 makes tokens of the prompt and the output less likely."""


# Fields of a generation_config.json that would change tokens, and with what value they do not.
_NOT_FOLLOWED: dict[str, float | None] = {
    "no_repeat_ngram_size": 0,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "forced_decoder_ids": None,
    "bad_words_ids": None,
    "force_words_ids": None,
    "sequence_bias": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "stop_strings": None,
    "num_beams": 1,
    "typical_p": 1,
    "top_h": None,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "encoder_repetition_penalty": 1,
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1,
    "penalty_alpha": 0,
    "dola_layers": None,
    "token_healing": 0,
    "watermarking_config": None,
}


def model_sampling_defaults(folder: Path) -> SamplingDefaults:
    """The defaults in a model folder's generation_config.json, and OpenAI's where the file says nothing.

    Raises ValueError, naming the file, for values that cannot be used.
    """
    config = _generation_config(folder)
    known = {name: config[name] for name in SamplingDefaults.model_fields if config.get(name) is not None}
    try:
        return SamplingDefaults.model_validate(known)
    except ValueError as error:
        raise ValueError(f"{folder / _GENERATION}: {error}") from error


def not_followed(folder: Path) -> str | None:
    """A warning with the fields of a model folder's generation_config.json that would change tokens, and are not
    followed; None without any. Raises ValueError for a file that cannot be read."""
    config = _generation_config(folder)
    found = [name for name, idle in _NOT_FOLLOWED.items() if config.get(name) not in (None, [], {}, idle)]
    return f"{folder / _GENERATION}: {', '.join(found)}: not followed, so tokens may be others" if found else None


def _generation_config(folder: Path) -> dict[str, Any]:
    path = folder / _GENERATION
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: holds a JSON {type(config).__name__}, must be an object")
    return config


class Limits(_Frozen):
    """The most that one request may ask for."""

    body_bytes: Annotated[int, Field(ge=1024)] = 4 * 1024 * 1024
    """Size of a request's body over HTTP, and of its message over gRPC."""
    output_tokens: Annotated[int, Field(ge=1)] | None = None
    """Output tokens of each choice; None: what the model's length leaves."""
    sequences: Annotated[int, Field(ge=1)] = 128
    """Prompts times choices."""
    top_logprobs: Annotated[int, Field(ge=0)] = 20
    """Likeliest tokens reported for each token."""
    messages: Annotated[int, Field(ge=1)] = 4096
    """Messages of a conversation."""
    timeout_seconds: Seconds = 3600.0
    """Time for the whole request; a client that asks for more gets this much."""


class ConnectionLimits(_Frozen):
    """The most that clients may take of a gateway before any request of theirs is complete, or between requests."""

    total: Annotated[int, Field(ge=1)] = 4096
    """Open connections over HTTP; fewer where the process may not open as many files. One more is closed with 503."""
    per_address: Annotated[int, Field(ge=1)] | None = None
    """Of these, connections from one address (IPv6: one /64). Unset: no own limit, since all clients behind a proxy
    have the proxy's address."""
    held_body_bytes: Annotated[int, Field(ge=1024 * 1024)] = 128 * 1024 * 1024
    """Bytes of the bodies of all HTTP requests under way together. Beyond, bodies of more than 64 KiB get 503."""
    keep_alive_seconds: Seconds = 75.0
    """How long a connection stays open without a request: longer than proxies keep theirs, 60 s mostly, so that no
    request meets a connection that closes."""
    grpc_total: Annotated[int, Field(ge=1)] = 1024
    """Open connections over gRPC."""
    grpc_seconds: Seconds = 300.0
    """How long a gRPC connection takes new calls, give or take a tenth. For its next call the client connects again, to
    whatever its name leads to by then; calls under way go on to their end."""


class NamedKey(_Frozen):
    """An API key that the scheduler knows by its name; the key itself need not be written down."""

    name: Annotated[str, Field(min_length=1)]
    """For logs and metrics, and for the class of service."""
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the key, in hexadecimal."""


class RequestSettings(_Frozen):
    """How a gateway takes requests, as its configuration says too."""

    default_timeout_seconds: Annotated[float, Field(gt=0)] | None = 600.0
    """Timeout of requests; null: limits.timeout_seconds."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the API; * for all."""
    allowed_hosts: tuple[str, ...] = ()
    """Names besides localhost by which clients may reach a server on loopback that asks for no keys."""
    tool_format: ToolFormat | None = None
    """How the model writes calls. Unset: as its chat template tells."""
    receipts: bool = False
    """Answers have receipts unless a request says otherwise; needs models.exact."""
    template_time: datetime | None = None
    """Date and time that a chat template sees, such as 2026-01-31T12:00:00; unset: the clock's, with which the same
    request has another prompt tomorrow."""
    limits: Limits = Limits()
    """Upper limits of one request."""
    connections: ConnectionLimits = ConnectionLimits()
    """Limits of connections."""


class GatewaySettings(RequestSettings):
    """One gateway, over HTTP and gRPC."""

    model_names: tuple[str, ...] = ()
    """Names that clients may give for the model, the first one being its own; empty: what the target workers say."""
    api_keys: tuple[SecretStr, ...] = ()
    """Keys without a name."""
    named_keys: tuple[NamedKey, ...] = ()
    """Keys with a name. A client must show one of either; without any, everybody may call."""
    metrics_keys: tuple[SecretStr, ...] = ()
    """Keys that may read metrics alone."""
    share_prefix_cache: bool = False
    """Whether requests with different keys take over each other's KV."""
    sampling: SamplingDefaults = SamplingDefaults()
    """What holds for requests that do not say."""
    receipt_key: SecretStr | None = None
    """Ed25519 private key in PEM that signs receipts; None: they are not signed."""
    ping_seconds: Seconds = 15.0
    """Each stream sends a comment once in this time, so that proxies do not close a silent one."""
    http: ListenSettings = ListenSettings(port=8000)
    """Where the HTTP server listens, when it is not Ray Serve's."""
    grpc: ListenSettings = ListenSettings(port=9000)
    """Where the gRPC server listens."""

    @property
    def keys_required(self) -> bool:
        return bool(self.api_keys or self.named_keys)

    @property
    def known_hosts(self) -> tuple[str, ...] | None:
        """Names by which HTTP clients may reach the server; None: any."""
        if self.keys_required or not is_loopback(self.http.host):
            return None
        return ("localhost", *self.allowed_hosts)

    def strftime_now(self, form: str) -> str:
        """For chat templates."""
        return (self.template_time or datetime.now()).strftime(form)
