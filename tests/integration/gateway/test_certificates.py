"""Certificates of clients' connections that are renewed while a gateway serves."""

from __future__ import annotations

import logging
import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import httpx
import pytest
import trustme
from cryptography.x509 import Certificate, load_der_x509_certificate

from spool.client.v1 import generation_pb2 as pb
from spool.client.v1.generation_pb2_grpc import GenerationServiceStub
from spool.services.gateway.settings import TlsFiles
from tests.support.certificates import issue_by
from tests.support.gateway import Gateways, Served
from tests.support.waiting import LONG

NAMES = ("localhost", "127.0.0.1")
FIRST, SECOND, THIRD = (datetime(2030, month, 2, 3, 4, 5, tzinfo=UTC) for month in (1, 2, 3))


def shown(authority: trustme.CA, address: str, name: str | None) -> Certificate:
    """The certificate of a new connection, of a client that names the server, or not."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(context)
    context.check_hostname = name is not None
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), LONG) as connection,
        context.wrap_socket(connection, server_hostname=name) as secured,
    ):
        found = secured.getpeercert(binary_form=True)
        assert found is not None
        return load_der_x509_certificate(found)


def expiries(authority: trustme.CA, served: Served) -> set[datetime]:
    """Of all that new connections show."""
    addresses = (urlsplit(served.url).netloc, served.address)
    return {shown(authority, address, name).not_valid_after_utc for address in addresses for name in (None, *NAMES)}


def test_a_renewed_certificate_is_shown_to_new_connections(
    gateways: Gateways, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Connections that are open stay; a renewal that cannot be used changes nothing, and is told once."""
    authority = trustme.CA()
    files = issue_by(authority, tmp_path, *NAMES, expires=FIRST)
    certificate, key = Path(files.certificate_file), Path(files.key_file)
    credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    caplog.set_level(logging.INFO, "spool.services.rpc.certificates")
    with (
        gateways.serve(tls=TlsFiles(certificate=certificate, key=key)) as served,
        httpx.Client(base_url=served.url, verify=ssl.create_default_context(cafile=files.ca_file)) as http,
        grpc.secure_channel(served.address, credentials) as channel,
    ):
        stub = GenerationServiceStub(channel)

        def metrics() -> set[float]:
            lines = http.get("/metrics", timeout=LONG).text.splitlines()
            found = [line.split() for line in lines if line.startswith("spool_certificate_expiry_timestamp_seconds{")]
            assert [name for name, _ in found] == [
                f'spool_certificate_expiry_timestamp_seconds{{server="{server}"}}' for server in ("http", "grpc")
            ]
            return {float(value) for _, value in found}

        def told() -> list[tuple[int, str]]:
            records = [(one.levelno, one.getMessage()) for one in caplog.records]
            caplog.clear()
            return records

        assert expiries(authority, served) == {FIRST}
        assert metrics() == {FIRST.timestamp()}
        assert stub.ListModels(pb.ListModelsRequest(), timeout=LONG).models
        assert told() == []

        issue_by(authority, tmp_path, *NAMES, expires=SECOND)
        assert expiries(authority, served) == {SECOND}
        assert metrics() == {SECOND.timestamp()}
        assert stub.ListModels(pb.ListModelsRequest(), timeout=LONG).models
        records = told()
        assert {level for level, _ in records} == {logging.INFO}
        assert all("was read again, it expires at 2030-02-02T03:04:05" in text for _, text in records)
        assert len(records) == 2

        others = issue_by(authority, tmp_path / "others", *NAMES, expires=SECOND + timedelta(1))
        right = key.read_bytes()
        for wrong in (b"no key at all", right[:40], Path(others.key_file).read_bytes(), None):
            if wrong is None:
                key.unlink()
            else:
                key.write_bytes(wrong)
            assert expiries(authority, served) == {SECOND}
            assert metrics() == {SECOND.timestamp()}
            records = told()
            assert [level for level, _ in records] == [logging.ERROR] * 2
            assert all("cannot be used, so the one that expires at 2030-02-02" in text for _, text in records)

        # As a mounted Secret changes: links lead to other files.
        issue_by(authority, tmp_path / "next", *NAMES, expires=THIRD)
        for file in (certificate, key):
            file.unlink(missing_ok=True)
            file.symlink_to(tmp_path / "next" / file.name)
        assert expiries(authority, served) == {THIRD}
        assert metrics() == {THIRD.timestamp()}
