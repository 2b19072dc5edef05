"""The configuration file: what it takes, and what it says about what it does not take."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import yaml

from spool.deploy.assembly.gateway import gateway_settings
from spool.deploy.cli import command_line as cli
from spool.deploy.cluster.addresses import metrics_urls
from spool.deploy.config.loading import configuration_from, load_configuration
from spool.deploy.config.problems import ConfigurationError
from spool.deploy.config.spool_config import SpoolConfig
from spool.scheduler.config import Policy, SchedulerConfig
from spool.scheduler.key_class import KeyClass
from spool.scheduler.messages import Role
from spool.services.gateway.answers.formats import ToolFormat
from spool.services.gateway.api_keys import ApiKeys
from spool.services.gateway.settings import SamplingDefaults

DIGEST = "0123456789abcdef" * 4


def problems(path: Path, content: str | bytes, *overrides: str) -> list[str]:
    """What is wrong with a file, each as `field message`."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigurationError) as raised:
        load_configuration(path, overrides)
    return [str(problem).removeprefix(f"{path}: ") for problem in raised.value.problems]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "spool.yaml"


def test_every_problem_is_reported(file: Path) -> None:
    content = """\
models:
  target: demo
  targt: x
  exact: 3
scheduling:
  draft_length: -1
  policy: fast
groups:
  target:
    replicas: 0
    autoscaling: {min_replicas: 3, max_replicas: 2}
gateway:
  host: 0.0.0.0
  port: 90000
internal:
  token: short
"""
    assert sorted(problems(file, content)) == sorted(
        [
            "models.targt is no field of Spool; did you mean models.target?",
            "models.exact is 3, must be a valid boolean, unable to interpret input",
            "scheduling.draft_length is -1, must be greater than or equal to 0",
            "scheduling.policy is 'fast', must be 'eqspec', 'exspec', 'ragged' or 'auto'",
            "groups.target.replicas is 0, must be greater than or equal to 1",
            "groups.target.autoscaling.max_replicas is 2, must be at least min_replicas, which is 3",
            "gateway.port is 90000, must be less than or equal to 65535",
            "internal.token has 5 characters, must have at least 16",
        ]
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            "models: [",
            "not YAML: while parsing a flow node expected the node content, but found '<stream end>', line 1",
        ),
        ("- models", "holds no `section:` lines, must begin with one"),
        ("models:\n  target: a\n  target: b", "not YAML: target is there twice, line 3, column 3"),
        ("models: &a\n  target: *a", "models.target is a section, must be a valid string"),
        ("models: !!python/object:os.system {}", "not YAML: could not determine a constructor for the tag"),
        ("? [a]\n: 1", "not YAML: while constructing a mapping, line 1, column 1: ? [a] ^ found unhashable key"),
        (b"models: \xff", "not YAML: unacceptable character #x00ff"),
        ("engine:\n  kv_memory: lots", "engine.kv_memory is 'lots', could not parse value and unit"),
        ("engine:\n  lookup_memory: 1KiB", "engine.lookup_memory is 1024, must be 0 or at least 1048576"),
        (
            "scheduling:\n  batch_size: 8\n  max_running: 4",
            "scheduling.max_running is 4, must be at least batch_size, which is 8",
        ),
        ("auth:\n  tls: {certificate: a}", "auth.tls.key is missing"),
        ("auth:\n  keys:\n  - {name: a, digest: abc}", "auth.keys.0.digest is no SHA-256 in hexadecimal"),
        (
            f"auth:\n  keys:\n  - {{name: a, digest: '{DIGEST}', max_runing: 3}}",
            "auth.keys.0.max_runing is no field of Spool; did you mean auth.keys.max_running?",
        ),
        (
            f"auth:\n  keys:\n  - {{name: a, digest: '{DIGEST}'}}\n  - {{name: b, digest: '{DIGEST}'}}",
            "auth.keys.1.digest is that of keys.0, must differ",
        ),
        ("tracing:\n  endpoint: 'ftp://a'", "tracing.endpoint is 'ftp://a', must be `console` or an http or https URL"),
        ("tracing:\n  endpoint: 'http://[::1'", "tracing.endpoint is 'http://[::1', must be `console` or an http"),
        ("tracing:\n  endpoint: 'http://a:b@c'", "tracing.endpoint holds a user or password, must not: OTEL_EXP"),
        ("tracing:\n  endpoint: 'grpc://a@c'", "tracing.endpoint holds a user or password, must not: OTEL_EXP"),
        ("ray:\n  address: here", "ray.address is 'here', must be `auto` or host:port"),
        ("gateway:\n  grpc_port: 8000", "gateway.grpc_port is 8000, must differ from port"),
        (
            "gateway:\n  allowed_hosts: [a.example, 'http://b.example']",
            "gateway.allowed_hosts.1 is 'http://b.example', must be a name in lower case",
        ),
        ("auth:\n  metrics_keys_env: A", "auth.metrics_keys_env is set, must be unset where no other keys are"),
        (
            "gateway:\n  allowed_origins: [https://a.example, https://a.example/]",
            "gateway.allowed_origins.1 is 'https://a.example/', must be * or scheme, host and port alone",
        ),
        ("models:\n  device: cuda:1", "models.device is 'cuda:1', must be 'auto', 'cpu' or 'cuda'"),
        ("models:\n  draft: none\n  draft_lookup: 3", "models.draft_lookup is 3, must be unset where draft is none"),
        ("gateway:\n  port: true", "gateway.port is true, must be a number"),
        ("gateway:\n  limits: {sequences: true}", "gateway.limits.sequences is true, must be a number"),
        ("groups:\n  draft: {resources: {a: true}}", "groups.draft.resources.a is true, must be a number"),
        (
            f"auth:\n  keys:\n  - {{name: a, digest: '{DIGEST}', max_running: true}}",
            "auth.keys.0.max_running is true, must be a number",
        ),
        ("models:\n  target: ngram", "models.target is 'ngram', must be a model"),
        ("internal:\n  token_env: A\n  token_file: b", "internal.token_file is given together with token_env"),
    ],
)
def test_single_problems(file: Path, content: str | bytes, expected: str) -> None:
    found = problems(file, content)
    assert len(found) == 1
    assert found[0].startswith(expected)


def test_listening_beyond_loopback_needs_keys_or_a_word(file: Path) -> None:
    beyond = "gateway:\n  host: 0.0.0.0\n"
    [found] = problems(file, beyond)
    assert found.startswith("gateway.host is '0.0.0.0', must be loopback")
    assert "allow_unauthenticated" in found
    for more in (
        "  allow_unauthenticated: true",
        "auth: {api_keys: [k]}",
        "auth: {api_keys_env: KEYS}",
        "auth: {api_keys_file: keys}",
    ):
        file.write_text(beyond + more)
        assert load_configuration(file).gateway.host == "0.0.0.0"
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        assert load_configuration(None, [f"gateway.host='{host}'"]).gateway.listens_on_loopback


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("groups: {draft: {num_gpus: 0.5}, target: {num_gpus: 1}}", "groups.draft.num_gpus is "),
        ("groups: {target: {num_gpus: 2}}", "groups.target.num_gpus is "),
        ("groups: {draft: {num_gpus: 2}}", "groups.draft.num_gpus is "),
        ("models: {device: cpu}\ngroups: {target: {num_gpus: 1}}", "must be 0 or unset where"),
        ("models: {device: cuda}\ngroups: {target: {num_gpus: 0}}", "must be above 0 where"),
        (
            "models: {draft: a/b, draft_in: targets}\ngroups: {target: {num_gpus: 0.5, kv_memory: 1GiB}}",
            "needs a kv_memory for",
        ),
    ],
)
def test_gpus_are_neither_shared_nor_reserved_by_accident(file: Path, content: str, message: str) -> None:
    assert any(message in found for found in problems(file, content))


def test_a_target_over_several_ranks(file: Path) -> None:
    four = "engine: {tensor_parallel_size: 4}\n"
    assert problems(file, f"{four}groups: {{target: {{num_gpus: 2}}}}")[0].endswith(
        "groups.target.num_gpus is 2, must be 0, 4 or unset, as engine.tensor_parallel_size is 4"
    )
    file.write_text(f"{four}groups: {{target: {{num_gpus: 4}}, draft: {{num_gpus: 1}}}}")
    assert load_configuration(file).groups.target.num_gpus == 4
    config = load_configuration(None, ["engine.tensor_parallel_size=4", "groups.target.num_cpus=8"]).on_one_machine()
    target, draft = (config.engine_settings(role, "cpu", config.threads(role)) for role in config.roles)
    assert (target.tensor_parallel_size, target.threads) == (4, 2)
    assert draft.tensor_parallel_size == 1


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("batch", "--set batch: must be section.field=value"),
        (".=1", "--set .=1: must be section.field=value"),
        ("models.target=[", "--set models.target=[: the value is not YAML"),
        ("scheduling.max_running=0", "--set scheduling.max_running=0: scheduling.max_running is 0, must be"),
        ("scheduling.batch_size=many", "--set scheduling.batch_size=many: scheduling.batch_size is 'many', must be a"),
        (
            "scheduling.draft_length=false",
            "--set scheduling.draft_length=false: scheduling.draft_length is false, must be a number",
        ),
        ("nothing.at=1", "--set nothing.at=1: nothing is no field of Spool"),
        ("models.target.x=1", "--set models.target.x=1: models.target is a section, must be a valid string"),
    ],
)
def test_wrong_overrides(override: str, expected: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        load_configuration(None, [override])
    assert str(raised.value).startswith(expected)


def test_secrets_do_not_show_but_travel() -> None:
    config = load_configuration(None, ["auth.api_keys=[open-sesame]", "internal.token=a-token-of-some-length"])
    assert "sesame" not in f"{config!r} {config.model_dump()} {config.model_dump_json()}"
    assert "of-some" not in f"{config!r} {config.model_dump()} {config.model_dump_json()}"
    assert configuration_from(config.plain()) == config
    assert yaml.safe_load(yaml.safe_dump(config.plain())) == config.plain()


def test_what_the_scheduler_and_the_engines_get() -> None:
    config = load_configuration(
        None,
        [
            "scheduling={batch_size: 2, max_running: 6, policy: ragged, draft_length: 3, max_queued_tokens: 99}",
            "groups.target={kv_memory: 7MiB, threads: 3}",
            "engine={kv_memory: 3MiB, prefix_cache: false, lookup_memory: 0}",
            "models={quantization: int4}",
        ],
    )
    expected = SchedulerConfig(batch_size=2, max_running=6, policy=Policy.RAGGED, draft_length=3, max_queued_tokens=99)
    assert config.scheduling.scheduler_config(drafting=True) == expected
    assert config.scheduling.scheduler_config(drafting=False).draft_length == 0
    target = config.engine_settings(Role.TARGET, "cpu", config.threads(Role.TARGET))
    assert (target.kv_memory_bytes, target.threads) == (7 << 20, 3)
    assert (target.lookup_memory, SpoolConfig().engine_settings(Role.TARGET, "cpu", 1).lookup_memory) == (0, 64 << 20)
    draft = config.engine_settings(Role.DRAFT, "cpu", 1)
    assert target.quantization == draft.quantization == "int4"
    assert config.engine_settings(Role.DRAFT, "cuda:0", 1).kv_memory_bytes == 3 << 20
    assert SpoolConfig().engine_settings(Role.DRAFT, "cuda:0", 1).kv_memory_bytes is None
    assert SpoolConfig().engine_settings(Role.DRAFT, "cpu", 1).kv_memory_bytes == 1 << 29
    assert (target.prefix_cache, SpoolConfig().engine_settings(Role.TARGET, "cpu", 1).prefix_cache) == (False, True)


@pytest.mark.parametrize(("policy", "rows"), [("auto", 256), ("ragged", 256), ("exspec", 8), ("eqspec", 8)])
def test_a_step_takes_all_that_run_unless_their_lengths_must_be_equal(policy: str, rows: int) -> None:
    named = f"scheduling.policy={policy}"
    assert load_configuration(None, [named]).scheduler_config().batch_size == rows
    assert load_configuration(None, [named, "scheduling.max_running=4"]).scheduler_config().batch_size == 4


@pytest.mark.parametrize(
    ("draft", "roles"),
    [
        ("", [Role.TARGET]),
        ("{replicas: 2}", [Role.TARGET, Role.DRAFT]),
        ("{autoscaling: {max_replicas: 2}}", [Role.TARGET, Role.DRAFT]),
        ("{num_cpus: 1}", [Role.TARGET, Role.DRAFT]),
        ("{threads: 1}", [Role.TARGET]),
    ],
)
def test_there_are_draft_workers_where_the_file_places_them(draft: str, roles: list[Role]) -> None:
    config = load_configuration(None, [f"groups.draft={draft or '{}'}"])
    for each in (config, configuration_from(config.plain()), config.without_replicas()):
        assert list(each.roles) == roles
    assert list(load_configuration(None, [f"groups.draft={draft or '{}'}", "models.draft=ngram"]).roles) == roles[:1]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            "models: {draft_in: targets}\ngroups: {draft: {replicas: 2}}",
            "groups.draft.replicas is set, must be unset: models.draft_in is targets, so that",
        ),
        (
            "models: {draft_in: targets}\nengine: {tensor_parallel_size: 2}",
            "engine.tensor_parallel_size is 2, must be 1: the draft demo runs beside a whole target",
        ),
        (
            "models: {draft: mtp, draft_kind: head}\ngroups: {draft: {autoscaling: {}}}",
            "groups.draft.autoscaling is set, must be unset: mtp is a drafting head, so that",
        ),
    ],
)
def test_drafts_inside_targets_have_no_workers(file: Path, content: str, expected: str) -> None:
    [found] = problems(file, content)
    assert found.startswith(expected)
    file.write_text(content)
    assert load_configuration(file, ["models.draft=ngram", "models.draft_kind=auto"]).roles == (Role.TARGET,)


@pytest.mark.parametrize(
    ("content", "head", "inside"),
    [
        ("", "demo-head", False),
        ("models: {draft_in: targets}", "demo-head", False),
        ("models: {draft_kind: model}", None, True),
        ("models: {draft_in: workers}", None, False),
        ("groups: {draft: {replicas: 2}}", None, False),
        ("models: {target: a/b, draft: demo}", None, True),
        ("models: {draft: ngram}", None, False),
    ],
)
def test_the_demo_drafts_with_a_head_unless_it_has_workers(
    file: Path, content: str, head: str | None, inside: bool
) -> None:
    file.write_text(content)
    config = load_configuration(file)
    assert (config.draft_head, config.drafts_inside) == (head, inside)
    assert config.engine_of(Role.TARGET, "cpu").draft_head == head


def test_fields_without_effect_are_named(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("models: {draft: ngram}\ngroups: {draft: {replicas: 2, autoscaling: {}}}")
    for words in (["config", "show", str(file)], ["config", "render", str(file)]):
        assert cli.run(words) == 0
        assert capsys.readouterr().err.splitlines() == [
            f"spool: warning: groups.draft.{field} has no effect any more: leave it out"
            for field in ("replicas", "autoscaling")
        ]
    assert load_configuration(file).without_effect() == ["groups.draft.replicas", "groups.draft.autoscaling"]
    assert load_configuration(file, ["models.draft=demo"]).without_effect() == []


def test_keys_with_a_name_go_to_the_gateway_and_to_the_scheduler() -> None:
    digests = [hashlib.sha256(secret).hexdigest() for secret in (b"one", b"two")]
    plain = [{"name": "a", "digest": digests[0], "weight": 3}, {"name": "b", "digest": digests[1], "max_running": 2}]
    config = configuration_from({"auth": {"keys": plain, "api_keys": ["three"]}, "gateway": {"tool_format": "mistral"}})
    assert config.scheduler_config().keys == (KeyClass("a", weight=3.0), KeyClass("b", max_running=2))
    settings = gateway_settings(config, SamplingDefaults())
    assert settings.tool_format is ToolFormat.MISTRAL
    keys = ApiKeys(settings.api_keys, settings.named_keys)
    assert [keys.check(b"Bearer " + key)[0] for key in (b"one", b"two", b"three")] == ["a", "b", ""]
    assert configuration_from({"auth": {"keys": plain}}).auth.required
    # Replicas make the same configuration from plain data.
    assert configuration_from(config.plain()) == config


def test_config_commands(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*words: str) -> str:
        assert cli.run(["config", *words]) == 0
        return capsys.readouterr().out

    file.write_text("scheduling: {draft_length: -1}")
    assert cli.run(["config", "show", str(file), "--set", "models.exact=maybe"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "spool: --set models.exact=maybe: models.exact is 'maybe', must be a valid boolean, unable to interpret input",
        f"spool: {file}: scheduling.draft_length is -1, must be greater than or equal to 0",
    ]
    file.write_text("models: {target: x}\nauth: {api_keys: [a-secret-key]}\n")
    shown = printed("show", str(file), "--set", "engine.kv_memory=2GiB")
    assert "a-secret-key" not in shown
    file.write_text(shown)
    again = load_configuration(file)
    assert (again.models.target, again.engine.kv_memory, again.gateway.port) == ("x", 2 << 30, 8000)


@pytest.mark.parametrize(("kind", "trouble"), [("link", "No such file or directory"), ("folder", "Is a directory")])
def test_a_default_file_that_cannot_be_read_is_named(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str, trouble: str
) -> None:
    monkeypatch.chdir(file.parent)
    if kind == "link":
        file.symlink_to("nowhere.yaml")
    else:
        file.mkdir()
    for words in (["config", "show"], ["config", "render"], ["serve", "--no-ray"]):
        assert cli.run(words) == 2
        assert capsys.readouterr().err == f"spool: spool.yaml: cannot be read: {trouble}\n"


def test_files_that_are_not_here_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here, gone = tmp_path / "here", tmp_path / "gone"
    here.touch()
    files = {
        "auth.tls.certificate": here,
        "auth.tls.key": gone,
        "auth.api_keys_file": gone,
        "internal.tls.certificate": gone,
        "internal.tls.key": here,
        "internal.tls.ca": gone,
        "gateway.receipt_key_file": gone,
        "models.chat_template": gone,
    }
    given = {"models.target": "org/name", "models.draft": gone, **files}
    overrides = [word for field, path in given.items() for word in ("--set", f"{field}={path}")]
    assert cli.run(["config", "show", *overrides]) == 0
    shown = capsys.readouterr()
    assert yaml.safe_load(shown.out)["auth"]["api_keys_file"] == str(gone)
    assert {*shown.err.splitlines()} == {
        *(f"spool: warning: {name} is {gone}, and there is no such file here" for name in files if files[name] == gone),
        f"spool: warning: models.draft is {gone}: no such folder, and not a hub id (organisation/model)",
    }
    assert cli.run(["config", "show"]) == 0
    assert capsys.readouterr().err == ""


def test_metrics_have_addresses_to_ask() -> None:
    def urls(*overrides: str) -> list[str]:
        return metrics_urls(load_configuration(None, overrides), "http://127.0.0.1:8000")

    own = "http://127.0.0.1:8000/metrics"
    assert urls() == [own, "http://127.0.0.1:8002/metrics"]
    assert urls("metrics.scheduler_address=null") == [own]
    assert urls("metrics.scheduler_address='[::]:9'", "groups.cells=2") == [
        own, "http://[::1]:9/metrics", "http://[::1]:10/metrics"
    ]  # fmt: skip
    assert urls("metrics.scheduler_address=node-7:9") == [own, "http://node-7:9/metrics"]
    # The schedulers are on another machine.
    assert urls("ray.address=10.0.0.1:6379") == [own]


def test_a_draft_and_a_target_alone_on_a_machine_each_compute_on_all_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 1, 2, 3})
    workers = "models.draft_in=workers"
    pair = load_configuration(None, [workers]).on_one_machine()
    assert [pair.threads(role) for role in pair.roles] == [4, 4]
    three = load_configuration(None, [workers, "groups.target.replicas=3"]).on_one_machine()
    assert [three.threads(role) for role in three.roles] == [1, 1]
    given = load_configuration(None, [workers, "groups.target.threads=1"]).on_one_machine()
    assert given.threads(Role.TARGET) == 1
    # A draft inside computes when its target does not.
    assert load_configuration(None, ["groups.target.replicas=2"]).on_one_machine().threads(Role.TARGET) == 2


def test_options_override_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("models: {target: a, draft: b}\ngateway: {port: 81, grpc_port: 82}\n")
    monkeypatch.chdir(file.parent)
    served: list[SpoolConfig] = []
    monkeypatch.setattr("spool.deploy.cli.serve.serve", lambda config, detach: served.append(config))
    assert cli.run(["serve"]) == 0
    words = "serve m --port 83 --api-key k1 --api-key k2 --kv-memory 2GiB --no-exact --policy ragged --threads 3"
    assert cli.run([*words.split(), "--set", "gateway.port=84", "--host", "0.0.0.0"]) == 0
    plain, given = served
    assert (plain.models.target, plain.models.draft, plain.gateway.port) == ("a", "b", 81)
    assert (given.models.target, given.models.draft) == ("m", "b")
    assert (given.gateway.host, given.gateway.port, given.gateway.grpc_port) == ("0.0.0.0", 83, 82)
    assert [key.get_secret_value() for key in given.auth.api_keys] == ["k1", "k2"]
    assert (given.engine.kv_memory, given.models.exact, given.scheduling.policy) == (2 << 30, False, Policy.RAGGED)
    assert (given.groups.target.threads, given.groups.draft.threads) == (3, 3)
