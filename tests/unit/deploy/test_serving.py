"""What stands around the Ray application: secrets, GPUs, addresses, state, and what commands say to bad input."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import tempfile
from hashlib import sha256
from pathlib import Path

import pytest
import yaml
from pydantic import SecretStr

from spool.deploy.assembly.gateway import gateway_settings
from spool.deploy.assembly.plain_message import plain_message
from spool.deploy.assembly.secrets import SecretError, channel_security
from spool.deploy.cli import command_line as cli
from spool.deploy.cluster.addresses import check_ports, curl_line, grpc_address, http_url, with_metrics_port
from spool.deploy.cluster.client import reason_of_failure
from spool.deploy.cluster.local_ray import LocalRay
from spool.deploy.cluster.served_state import Served, StateFolder
from spool.deploy.config.ingress import InternalSettings
from spool.deploy.config.loading import configuration_from, load_configuration
from spool.deploy.errors import RunError, UsageError
from spool.deploy.ray_app.application import settled
from spool.deploy.ray_app.gpus import gpus_per_replica, on_gpus_of_ray
from spool.deploy.ray_app.serve_options import serve_file
from spool.protos import scheduler_pb2
from spool.scheduler.messages import Role
from spool.services.gateway.settings import SamplingDefaults
from tests.support.certificates import issue
from tests.support.command_line import spool_here
from tests.support.ports import free_ports

TOKEN = "a-token-of-some-length"
BOTH = {Role.TARGET: 1.0, Role.DRAFT: 1.0}


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateFolder:
    monkeypatch.setenv("SPOOL_STATE", str(tmp_path / "state"))
    return StateFolder()


def gpus(monkeypatch: pytest.MonkeyPatch, of_ray: float, *overrides: str) -> dict[Role, float]:
    monkeypatch.setattr("spool.deploy.ray_app.gpus._gpus_of_ray", lambda: of_ray)
    return dict(gpus_per_replica(on_gpus_of_ray(load_configuration(None, overrides))))


def test_gpus_go_to_the_targets_first(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = "models.draft_in=workers"
    assert gpus(monkeypatch, 0, workers) == dict.fromkeys(BOTH, 0.0)
    assert gpus(monkeypatch, 1, "groups.draft.replicas=2") == {Role.TARGET: 1.0, Role.DRAFT: 0.0}
    assert gpus(monkeypatch, 2) == BOTH
    assert gpus(monkeypatch, 2, "groups.target.replicas=2") == {Role.TARGET: 1.0}
    assert gpus(monkeypatch, 2, workers, "groups.target.replicas=2") == {Role.TARGET: 1.0, Role.DRAFT: 0.0}
    assert gpus(monkeypatch, 3, "groups.draft.num_gpus=1", "groups.target.replicas=3")[Role.TARGET] == 0.0
    assert gpus(monkeypatch, 8, workers, "models.device=cpu") == dict.fromkeys(BOTH, 0.0)
    assert gpus(monkeypatch, 0, workers, "models.device=cuda") == BOTH
    assert gpus(monkeypatch, 2, "models.draft=ngram", "models.device=cuda") == {Role.TARGET: 1.0}
    assert gpus(monkeypatch, 1, "models.draft=none") == {Role.TARGET: 1.0}
    assert gpus(monkeypatch, 4, "groups.cells=2") == BOTH
    assert gpus(monkeypatch, 3, "groups.cells=2") == {Role.TARGET: 1.0}
    assert gpus(monkeypatch, 3, "groups.cells=2", workers) == {Role.TARGET: 1.0, Role.DRAFT: 0.0}
    assert gpus(monkeypatch, 1, "groups.cells=2", workers) == dict.fromkeys(BOTH, 0.0)


def test_a_pair_on_the_only_device_is_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus(monkeypatch, 0) == {Role.TARGET: 0.0}
    assert gpus(monkeypatch, 1) == {Role.TARGET: 1.0}
    assert gpus(monkeypatch, 8, "models.device=cpu") == {Role.TARGET: 0.0}
    assert gpus(monkeypatch, 2, "models.draft_in=targets") == {Role.TARGET: 1.0}
    share = "groups.target={num_gpus: 0.5, kv_memory: 1GiB}"
    assert gpus(monkeypatch, 2, share, "groups.draft.kv_memory=1GiB") == {Role.TARGET: 0.5, Role.DRAFT: 1.0}
    assert gpus(monkeypatch, 3, "groups.target.autoscaling.max_replicas=3") == {Role.TARGET: 1.0}


def test_a_target_over_several_gpus_gets_all_of_them_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    four = "engine.tensor_parallel_size=4"
    assert gpus(monkeypatch, 5, four) == {Role.TARGET: 4.0, Role.DRAFT: 1.0}
    assert gpus(monkeypatch, 8, four, "groups.target.replicas=2") == {Role.TARGET: 4.0, Role.DRAFT: 0.0}
    assert gpus(monkeypatch, 7, four, "groups.target.replicas=2") == {Role.TARGET: 0.0, Role.DRAFT: 1.0}
    assert gpus(monkeypatch, 1, four) == {Role.TARGET: 0.0, Role.DRAFT: 1.0}
    assert gpus(monkeypatch, 0, four, "models.device=cuda") == {Role.TARGET: 4.0, Role.DRAFT: 1.0}


def test_a_pair_shares_the_only_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file asks for draft workers all the same."""
    shared, workers = {Role.TARGET: 0.5, Role.DRAFT: 0.5}, "models.draft_in=workers"
    assert gpus(monkeypatch, 1, workers) == shared
    assert gpus(monkeypatch, 1, workers, "models.device=cuda") == shared
    assert gpus(monkeypatch, 1, workers, "models.device=cpu") == dict.fromkeys(BOTH, 0.0)
    assert gpus(monkeypatch, 1, workers, "groups.target.num_gpus=1")[Role.TARGET] == 1.0
    assert gpus(monkeypatch, 1, "groups.draft.autoscaling.max_replicas=2")[Role.TARGET] == 1.0
    written_down = settled(load_configuration(None, [workers]))
    assert [written_down.group(role).num_gpus for role in written_down.roles] == [0.5, 0.5]
    again = configuration_from(written_down.plain())
    assert again.pair_shares_a_gpu
    assert not load_configuration(None, [workers]).pair_shares_a_gpu


def test_secrets_come_from_where_the_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert channel_security(InternalSettings(token=SecretStr(TOKEN))).token == TOKEN
    file = tmp_path / "token"
    with pytest.raises(SecretError, match=r"internal\.token_file is .* cannot be read"):
        channel_security(InternalSettings(token_file=file))
    file.write_text(f"{TOKEN}\n")
    monkeypatch.chdir(tmp_path)
    settings = load_configuration(None, ["internal.token_file=token"]).internal
    monkeypatch.chdir("/")
    assert channel_security(settings).token == TOKEN
    with pytest.raises(SecretError, match=r"internal\.token_env is SECRET, and the environment has no such variable"):
        channel_security(InternalSettings(token_env="SECRET"))
    monkeypatch.setenv("SECRET", TOKEN)
    assert channel_security(InternalSettings(token_env="SECRET")).token == TOKEN
    monkeypatch.setenv("SECRET", "short")
    with pytest.raises(SecretError, match=r"^internal\.token_env names a token .*: token has 5 characters, must have"):
        channel_security(InternalSettings(token_env="SECRET"))


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("run", [(), ("--no-ray",)])
def test_a_source_of_keys_that_holds_none_does_not_open_the_server(
    host: str, run: tuple[str, ...], tmp_path: Path, state: StateFolder
) -> None:
    """Nor does one with keys that no client can send. The error comes before anything is loaded."""
    files = {
        "empty": "",
        "blank": "\n \n\t\n",
        "foreign": "plain\nschl\u00fcssel\n",
        "binary": b"\xff\xfe",
        "words": "plain\n\na phrase\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    variables = {"COMMAS": ",", "SPACED": " , ,", "EMPTY": "", "BLANK": "  ", "FOREIGN": "plain, schl\u00fcssel"}
    form = "must be printable ASCII without spaces, at least one character"
    for field, value, complaint in (
        ("auth.api_keys_env", "COMMAS", "is COMMAS, which holds no key, must hold at least one"),
        ("auth.api_keys_env", "SPACED", "is SPACED, which holds no key"),
        ("auth.api_keys_env", "EMPTY", "is EMPTY, a variable that is empty"),
        ("auth.api_keys_env", "BLANK", "is BLANK, a variable that is empty"),
        ("auth.api_keys_env", "UNSET", "is UNSET, and the environment has no such variable"),
        ("auth.api_keys_env", "FOREIGN", f"is FOREIGN, whose key 2 {form}"),
        ("auth.api_keys_file", "empty", "/empty, which is empty"),
        ("auth.api_keys_file", "blank", "/blank, which is empty"),
        ("auth.api_keys_file", "foreign", f"/foreign, whose key 2 {form}"),
        ("auth.api_keys_file", "words", f"/words, whose key 2 {form}"),
        ("auth.api_keys_file", "binary", "/binary, which cannot be read"),
        ("auth.metrics_keys_env", "COMMAS", "is COMMAS, which holds no key, must hold at least one"),
        ("auth.metrics_keys_file", "blank", "/blank, which is empty"),
        ("gateway.receipt_key_file", "blank", "/blank, which is empty"),
        ("internal.token_env", "BLANK", "is BLANK, a variable that is empty"),
        ("internal.token_file", "blank", "/blank, which is empty"),
        ("auth.api_keys", "['']", form),
        ("auth.api_keys", "[' ']", form),
        ("internal.token", f"'{' ' * 20}'", form),
        (
            "auth.keys",
            json.dumps([{"name": "a", "digest": sha256(b"").hexdigest()}]),
            "digest is that of no characters",
        ),
    ):
        settings = ["--host", host, "--set", f"{field}={value}"]
        if not field.startswith(("auth.api_keys", "auth.keys")):
            settings += ["--set", "auth.api_keys=[k]"]
        ended = spool_here("serve", "./no-such-model", *run, *settings, cwd=tmp_path, environment=variables)
        assert ended.code == 2, (field, value)
        assert field in ended.err, ended.err
        assert complaint in ended.err


def test_certificates_are_named_by_their_fields(tmp_path: Path) -> None:
    files = issue(tmp_path, "localhost")
    right = {"ca": files.ca_file, "certificate": files.certificate_file, "key": files.key_file}
    assert channel_security(InternalSettings.model_validate({"tls": right})).tls
    (tmp_path / "empty").touch()
    for name, wrong, reason in [
        ("ca", tmp_path / "missing", "cannot be read: .* No such file"),
        ("certificate", tmp_path, "cannot be read: .* Is a directory"),
        ("key", tmp_path / "empty", "is empty"),
        ("key", files.certificate_file, "must be a private key without a password in PEM"),
        ("certificate", files.key_file, "must be a certificate in PEM"),
    ]:
        tls = right | {name: str(wrong)}
        with pytest.raises(SecretError, match=rf"^internal\.tls\.{name} is {wrong}, .*{reason}"):
            channel_security(InternalSettings.model_validate({"tls": tls}))
        if name != "ca":
            del tls["ca"]
            config = load_configuration(None, [f"auth={json.dumps({'api_keys': ['k'], 'tls': tls})}"])
            with pytest.raises(SecretError, match=rf"^auth\.tls\.{name} is {wrong}, .*{reason}"):
                gateway_settings(config, SamplingDefaults())
    config = load_configuration(None, [f"gateway.receipt_key_file={files.ca_file}"])
    with pytest.raises(SecretError, match=rf"^gateway\.receipt_key_file is {files.ca_file}: .* private key in PEM"):
        gateway_settings(config, SamplingDefaults())


def test_the_file_for_serve_makes_the_same_configuration() -> None:
    overrides = ["auth.api_keys=[k]", "scheduling.batch_size=3", "gateway.port=81"]
    config = load_configuration(None, overrides)
    content = yaml.safe_load(serve_file(config))
    # Gateways listen themselves.
    assert content["proxy_location"] == "Disabled"
    [application] = content["applications"]
    assert configuration_from(application["args"]["settings"]) == config


def test_addresses(tmp_path: Path) -> None:
    overrides = ["gateway.host='::'", "gateway.allow_unauthenticated=true", "gateway.grpc_port=null"]
    config = load_configuration(None, overrides)
    assert (http_url(config), grpc_address(config)) == ("http://[::1]:8000", None)
    config = load_configuration(None, ["auth={api_keys: [k], tls: {certificate: c, key: k}}"])
    assert (http_url(config), grpc_address(config)) == ("https://127.0.0.1:8000", "127.0.0.1:8001")
    assert "Authorization: Bearer YOUR-KEY" in curl_line(config, http_url(config))


def test_commands_of_the_start_screen_trust_the_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    issued = issue(tmp_path, "localhost")

    def shown(certificate: str) -> str:
        config = load_configuration(None, [f"auth={{api_keys: [k], tls: {{certificate: {certificate}, key: k}}}}"])
        return curl_line(config, http_url(config)).partition("https:")[0]

    assert shown(issued.certificate_file) == "curl --cacert YOUR-AUTHORITY.pem "
    # It vouches for itself.
    assert shown(issued.ca_file) == f"curl --cacert {issued.ca_file} "
    assert shown(str(tmp_path / "on-another-node.pem")) == "curl --cacert YOUR-AUTHORITY.pem "
    monkeypatch.setenv("SSL_CERT_FILE", issued.ca_file)
    assert shown(issued.certificate_file) == "curl "
    config = load_configuration(None, [])
    assert curl_line(config, http_url(config)).startswith("curl http://127.0.0.1:8000/")


def test_the_schedulers_metrics_have_a_port_of_their_own_beside_each_gateway() -> None:
    def chosen(*overrides: str) -> str | None:
        return with_metrics_port(load_configuration(None, overrides)).metrics.scheduler_address

    http, grpc = free_ports(2)
    ports = (f"gateway.port={http}", f"gateway.grpc_port={grpc}")
    host, _, port = str(chosen(*ports)).rpartition(":")
    assert (host, http + 2 <= int(port) <= http + 101, int(port) != grpc) == ("127.0.0.1", True, True)
    with socket.socket() as taken:
        taken.bind((host, int(port)))
        taken.listen()
        again = int(str(chosen(*ports)).rpartition(":")[2])
        assert again > int(port)
        check_ports(with_metrics_port(load_configuration(None, ports)))
        given = f"metrics.scheduler_address='127.0.0.1:{port}'"
        assert chosen(*ports, given) == f"127.0.0.1:{port}"
        with pytest.raises(UsageError, match=rf"metrics.scheduler_address is {port}, .* Address already in use"):
            check_ports(load_configuration(None, (*ports, given)))
    assert chosen(*ports, "metrics.scheduler_address=null") is None


def test_ports_that_are_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            UsageError, match=rf"gateway.grpc_port is {port}, .*: Address already in use \(.* --grpc-port N\)"
        ):
            check_ports(load_configuration(None, [f"gateway.grpc_port={port}"]))


def test_state_is_read_back_and_forgotten(state: StateFolder) -> None:
    assert state.read("spool") is None
    served = Served("spool", "127.0.0.1:1", 3, "http://127.0.0.1:8000", None, "demo", True, "/logs")
    state.write(served)
    assert state.read("spool") == served
    (state.path / "spool.json").write_text(json.dumps({"app_name": "spool"}))
    assert state.read("spool") is None
    state.forget("spool")
    state.forget("spool")


def test_the_token_of_ray_is_made_once_and_private(state: StateFolder) -> None:
    file = state.ray_token_file()
    assert len(file.read_text()) == 64
    assert os.stat(file).st_mode & 0o077 == 0
    assert os.stat(state.path).st_mode & 0o077 == 0
    content = file.read_text()
    assert StateFolder().ray_token_file().read_text() == content
    file.write_text("\n")
    assert len(StateFolder().ray_token_file().read_text()) == 64


def test_messages_keep_their_numbers() -> None:
    message = scheduler_pb2.StatusReply(
        scheduler_epoch=1 << 60, model=scheduler_pb2.ServedModel(tokenizer_digest=b"\1")
    )
    message.workers.add(worker_id="a", state=scheduler_pb2.WORKER_STATE_IN_USE)
    data = plain_message(message)
    assert data["scheduler_epoch"] == 1 << 60
    assert data["model"]["tokenizer_digest"] == "01"
    assert data["workers"][0]["state"] == "WORKER_STATE_IN_USE"
    assert data["live_set"] is None


def test_the_reason_is_found_in_what_serve_says() -> None:
    message = """The deployment failed to start 2 times in a row. See controller logs for details.
Traceback (most recent call last):
  File "x.py", line 1, in f
spool.engine.errors.UnsupportedModelError: mamba has layers of type mamba, only full_attention is supported"""
    assert reason_of_failure(message).endswith("only full_attention is supported")
    assert reason_of_failure("nothing known") == "nothing known"
    assert "if memory ran out: " in reason_of_failure("Traceback ...\nMemoryError: Unable to allocate 400 GiB\n")
    assert reason_of_failure("") == "no reason is known"


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("serve --set models.target=/", 2, "the folder holds no config.json and no GGUF file, so no model"),
        ("serve --set ray.address=127.0.0.1:1", 1, "Ray at 127.0.0.1:1 cannot be joined: Connection refused"),
        ("serve --no-ray --set ray.address=auto", 2, "ray.address is 'auto', must be unset with --no-ray"),
        ("serve --no-ray --set groups.cells=2", 2, "groups.cells is 2, must be 1 with --no-ray"),
        ("serve --no-ray --detach", 2, "--detach is given, must be left out with --no-ray"),
        ("serve --no-ray --set groups.draft.autoscaling.max_replicas=2", 2, "groups.draft.autoscaling is set, must be"),
        ("serve --no-ray --set internal.token_env=NO_SUCH", 2, "internal.token_env is NO_SUCH, and the"),
        ("serve --prot 3", 2, "No such option: --prot (Possible options: --draft, --host, --port)"),
        ("serve --port 99999", 2, "--port: gateway.port is 99999, must be less than or equal to"),
        ("serve --host 0.0.0.0", 2, "--host: gateway.host is '0.0.0.0', must be loopback"),
        ("serve --kv-memory lots", 2, "--kv-memory: engine.kv_memory is 'lots', could not parse value and unit"),
        ("k8s drain --seconds 0", 2, "--seconds"),
        ("k8s drain --seconds 60 --address 127.0.0.1:1", 1, ":1 cannot be joined: Connection refused"),
        ("status", 1, "spool is not served here"),
        ("status --app a/b", 2, "the application's name is 'a/b', must be up to 64 letters"),
        ("chat --priority 2147483648", 2, "'--priority': Input should be less than or equal to 2147483647"),
        ("chat --app other", 1, "other is not served here"),
        ("chat --url nope", 2, "--url is 'nope', must be as in http://127.0.0.1:8000"),
        ("chat --url http://127.0.0.1:1", 1, "http://127.0.0.1:1 does not answer"),
        ("config show nowhere.yaml", 2, "nowhere.yaml: cannot be read: No such file or directory"),
    ],
)
def test_bad_input_gets_one_line(
    state: StateFolder, capsys: pytest.CaptureFixture[str], command: str, code: int, message: str
) -> None:
    assert cli.run(command.split()) == code
    told = capsys.readouterr().err
    assert message in told
    assert len(told.splitlines()) == 1
    assert "Traceback" not in told


def test_the_folder_of_ray_is_closed_to_others(
    tmp_path: Path, state: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that was made beforehand is closed where it is ours, and refused where it is anything else."""
    scratch = Path(tempfile.mkdtemp(prefix="spool-"))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    # Ray is not started: where it would be, the folder is ready.
    monkeypatch.setattr(StateFolder, "ray_log", lambda *_: 1 / 0)
    above = scratch / f"spool-{os.getuid()}"

    def start() -> None:
        with pytest.raises(ZeroDivisionError):
            LocalRay("spool", state)

    try:
        start()
        assert stat.S_IMODE(above.stat().st_mode) == 0o700
        [folder] = above.iterdir()
        above.chmod(0o777)
        folder.chmod(0o777)
        (folder / "session_of_before").mkdir()
        (folder / "ray_current_cluster").write_text("planted")
        start()
        assert stat.S_IMODE(above.stat().st_mode) == 0o700
        assert list(folder.iterdir()) == []
        for own, other in ((folder, tmp_path / "elsewhere"), (above, tmp_path / "beyond")):
            own.rename(other)
            own.symlink_to(other)
            with pytest.raises(RunError, match=rf"{own} cannot be made a folder: .*\$TMPDIR names another"):
                LocalRay("spool", state)
            own.unlink()
            own.write_text("")
            with pytest.raises(RunError, match=rf"{own} cannot be made a folder"):
                LocalRay("spool", state)
            own.unlink()
            own.mkdir()
        if os.getuid() == 0:
            os.chown(above, 12345, -1)
            with pytest.raises(RunError, match=rf"{above} belongs to user 12345, must belong to user 0"):
                LocalRay("spool", state)
    finally:
        shutil.rmtree(scratch)
