"""Settings of the internal channels, and where servers may listen."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio
import pytest

from spool.services.rpc.channel_security import ChannelSecurity, InsecureListenError, random_token
from tests.support.certificates import issue


def listen(security: ChannelSecurity, host: str) -> str:
    async def run() -> str:
        server = grpc.aio.server()
        address = security.listen(server, host, 0)
        await server.stop(None)
        return address

    return asyncio.run(run())


def test_token_is_not_shown() -> None:
    security = ChannelSecurity(token=random_token())
    assert security.token not in repr(security)
    assert security.metadata == (("authorization", f"Bearer {security.token}"),)
    assert ChannelSecurity().metadata == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token": "short"}, "token has 5 characters, must have at least 16"),
        ({"token": "with spaces in between"}, "printable ASCII without spaces"),
        ({"token": "with\na line break in it"}, "printable ASCII without spaces"),
        ({"token": "ünïcödé-ünïcödé-ünïcödé"}, "printable ASCII without spaces"),
        ({"ca_file": "ca.pem"}, "certificate_file, key_file must be given too"),
        ({"certificate_file": "c.pem", "key_file": "k.pem"}, "ca_file must be given too"),
        ({"server_name": "spool"}, "server_name is 'spool', and has no meaning without"),
    ],
)
def test_wrong_settings_are_named(fields: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChannelSecurity(**fields)


def test_json_round_trip(tmp_path: Path) -> None:
    security = issue(tmp_path, "localhost", server_name="localhost", token=random_token())
    assert ChannelSecurity.from_json(security.to_json()) == security
    assert ChannelSecurity.from_json("{}") == ChannelSecurity()
    for text in ("[1]", '{"tokens": "x"}', "nonsense", '"text"'):
        with pytest.raises(ValueError, match=r".+"):
            ChannelSecurity.from_json(text)


def test_where_servers_may_listen(tmp_path: Path) -> None:
    opened, with_token = ChannelSecurity(), ChannelSecurity(token=random_token())
    assert listen(opened, "127.0.0.1").startswith("127.0.0.1:")
    assert listen(opened, "localhost").startswith("localhost:")
    for host in ("192.0.2.1", "node.example"):
        with pytest.raises(InsecureListenError, match=f"host is {host}, which is open to strangers"):
            listen(opened, host)
    for security in (opened, with_token):
        for host in ("0.0.0.0", "::"):
            with pytest.raises(InsecureListenError, match="one address of this node"):
                listen(security, host)
    with pytest.raises(OSError, match=r"host 192.0.2.1, port 0: cannot be bound"):
        listen(with_token, "192.0.2.1")
    missing = ChannelSecurity("", str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "c"))
    with pytest.raises(FileNotFoundError):
        listen(missing, "127.0.0.1")
