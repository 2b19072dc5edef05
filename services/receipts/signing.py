"""Ed25519 signatures of receipts. The library is imported where one is made or checked."""

from __future__ import annotations

from typing import Any

ALGORITHM = "Ed25519"


class ReceiptKey:
    """A private key in PEM. Raises ValueError for anything else."""

    def __init__(self, pem: str) -> None:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            key = load_pem_private_key(pem.encode(), password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ValueError(f"the key of receipts cannot be read, must be a private key in PEM: {error}") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ValueError(f"the key of receipts is a {type(key).__name__}, must be one of {ALGORITHM}")
        self._key = key
        self.public = key.public_key().public_bytes_raw().hex()
        """64 hexadecimal digits."""

    def sign(self, data: bytes) -> dict[str, str]:
        return {"algorithm": ALGORITHM, "public_key": self.public, "value": self._key.sign(data).hex()}


def check_signature(signature: Any, data: bytes, public_key: str | None) -> None:
    """Raises ValueError, naming the place, unless `signature` is one of `data`, by this key if one is given. None is
    right if none is given."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if signature is None and public_key is None:
        return
    if not isinstance(signature, dict) or signature.keys() != {"algorithm", "public_key", "value"}:
        raise ValueError("signature is missing or incomplete, must have algorithm, public_key and value")
    if signature["algorithm"] != ALGORITHM:
        raise ValueError(f"signature.algorithm is {signature['algorithm']!r}, must be {ALGORITHM}")
    if public_key is not None and signature["public_key"] != public_key:
        raise ValueError(f"signature.public_key is {signature['public_key']!r}, must be {public_key}")
    try:
        key, value = (_bytes(signature[name]) for name in ("public_key", "value"))
        Ed25519PublicKey.from_public_bytes(key).verify(value, data)
    except (InvalidSignature, ValueError, TypeError) as error:
        raise ValueError("signature.value is not what signature.public_key makes of the digests") from error


def _bytes(digits: str) -> bytes:
    """Of hexadecimal digits in lower case: a signature has one form."""
    found = bytes.fromhex(digits)
    if found.hex() != digits:
        raise ValueError("not in lower case")
    return found
