"""Certificates for mutual TLS."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import trustme

from spool.services.rpc.channel_security import ChannelSecurity


def issue(folder: Path, *names: str, server_name: str = "", token: str = "") -> ChannelSecurity:
    """A new authority and one certificate of it, for these names or addresses, as files in the folder."""
    authority = trustme.CA()
    return issue_by(authority, folder, *names, server_name=server_name, token=token)


def issue_by(
    authority: trustme.CA,
    folder: Path,
    *names: str,
    server_name: str = "",
    token: str = "",
    expires: datetime | None = None,
) -> ChannelSecurity:
    folder.mkdir(parents=True, exist_ok=True)
    ca, certificate, key = folder / "ca.pem", folder / "certificate.pem", folder / "key.pem"
    issued = authority.issue_cert(*names, not_after=expires)
    authority.cert_pem.write_to_path(ca)
    issued.private_key_pem.write_to_path(key)
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    return ChannelSecurity(token, str(ca), str(certificate), str(key), server_name)
