"""Which workers may serve together: a draft's token ids must mean the same as its target's."""

from __future__ import annotations

from collections.abc import Iterable

from spool.protos import worker_pb2
from spool.scheduler.errors import SpoolError
from spool.services.rpc.protocol_version import Versions, version_conflict
from spool.services.rpc.worker_codec import ROLES

_SAME_ON_TARGETS = ("model_id", "dtype", "kv_cache_dtype", "quantization", "vocabulary_size")


class PairingError(SpoolError, ValueError):
    """A worker cannot serve with the others, or with this scheduler; the message says how they differ."""


def check_pairing(
    name: str, new: worker_pb2.WorkerDescription, others: Iterable[tuple[str, worker_pb2.WorkerDescription]]
) -> None:
    """Raises PairingError unless the worker `new` fits every one of `others`, each given by name and description.

    Targets must hold the same model in the same number format and quantisation, and KV in one format, so that any of
    them can take over a sequence. A draft must take the target's token ids; with an empty digest (it works with any)
    its vocabulary must not be the smaller one. Drafts need not fit each other.
    """
    for other_name, other in others:
        if new.role == other.role == worker_pb2.ROLE_TARGET:
            _check_targets(name, new, other_name, other)
        elif new.role == worker_pb2.ROLE_DRAFT and other.role == worker_pb2.ROLE_TARGET:
            _check_draft(name, new, other_name, other)
        elif new.role == worker_pb2.ROLE_TARGET and other.role == worker_pb2.ROLE_DRAFT:
            _check_draft(other_name, other, name, new)


def _check_targets(
    name: str, one: worker_pb2.WorkerDescription, other_name: str, other: worker_pb2.WorkerDescription
) -> None:
    differences = [
        f"{field} {getattr(one, field)} and {getattr(other, field)}"
        for field in _SAME_ON_TARGETS
        if getattr(one, field) != getattr(other, field)
    ]
    if one.tokenizer_digest != other.tokenizer_digest:
        differences.append(f"tokenizer digest {_short(one.tokenizer_digest)} and {_short(other.tokenizer_digest)}")
    if bool(one.exact_row_counts) != bool(other.exact_row_counts):
        differences.append(f"exact mode {_on(one)} and {_on(other)}")
    if differences:
        raise PairingError(f"target workers {name} and {other_name} differ: {'; '.join(differences)}")


def _check_draft(
    name: str, draft: worker_pb2.WorkerDescription, target_name: str, target: worker_pb2.WorkerDescription
) -> None:
    sizes = f"vocabulary sizes {draft.vocabulary_size} and {target.vocabulary_size}"
    if not draft.tokenizer_digest:
        if 0 < draft.vocabulary_size < target.vocabulary_size:
            raise PairingError(f"draft worker {name} does not fit target worker {target_name}: {sizes}")
        return
    differences = []
    if draft.tokenizer_digest != target.tokenizer_digest:
        digests = f"{_short(draft.tokenizer_digest)} and {_short(target.tokenizer_digest)}"
        differences.append(f"tokenizer digests differ ({digests})")
    if differences or draft.vocabulary_size != target.vocabulary_size:
        differences.append(sizes)
        raise PairingError(
            f"draft worker {name} ({draft.model_id}) does not fit target worker {target_name} ({target.model_id}): "
            f"{'; '.join(differences)}"
        )


def check_version(name: str, description: worker_pb2.WorkerDescription, ours: Versions) -> None:
    """Raises PairingError unless the worker speaks a version of the protocol that this scheduler speaks."""
    conflict = version_conflict(f"worker {name}", description, "this scheduler", ours)
    if conflict is not None:
        raise PairingError(conflict)


def check_role(name: str, expected: worker_pb2.Role, description: worker_pb2.WorkerDescription) -> None:
    """Raises PairingError unless the worker has the role it was announced with."""
    if description.role != expected:
        try:
            found = ROLES.from_wire(description.role).value
        except ValueError:
            found = f"of role {description.role}"
        raise PairingError(f"worker {name} is {found}, must be {ROLES.from_wire(expected).value}")


def _short(digest: bytes) -> str:
    return digest.hex()[:12] or "none"


def _on(description: worker_pb2.WorkerDescription) -> str:
    return "on" if description.exact_row_counts else "off"
