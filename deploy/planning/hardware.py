"""What steps cost on kinds of GPUs that nobody has measured here: the roofline of their data sheets.

A pass reads the weights once, and the KV of its sequences, at a share of the memory's bandwidth; each token takes two
operations a parameter, at a share of the arithmetic of dense bfloat16 products.
"""

from __future__ import annotations

from dataclasses import dataclass

_KV_SHARE = 0.9
"""Of what the weights leave of the memory. The rest is for CUDA and for what a pass needs."""


@dataclass(frozen=True, slots=True)
class GpuKind:
    """From the makers' data sheets: bytes, bytes a second, and dense bfloat16 operations a second."""

    memory: float
    bandwidth: float
    operations: float


GPU_KINDS = {
    "a10": GpuKind(24e9, 600e9, 125e12),
    "a100-40gb": GpuKind(40e9, 1555e9, 312e12),
    "a100-80gb": GpuKind(80e9, 2039e9, 312e12),
    "b200": GpuKind(180e9, 7700e9, 2250e12),
    "h100": GpuKind(80e9, 3350e9, 989e12),
    "h200": GpuKind(141e9, 4800e9, 989e12),
    "l4": GpuKind(24e9, 300e9, 121e12),
    "l40s": GpuKind(48e9, 864e9, 362e12),
    "mi300x": GpuKind(192e9, 5300e9, 1307e12),
}


@dataclass(frozen=True, slots=True)
class ReplicaKind:
    """A replica of a model on one kind of device. Seconds of a pass: `step` + `token` · its tokens + `kv_token` · the
    tokens of KV that it reads, with its tokens rounded up to blocks of `block_tokens`. It has room for the KV of
    `kv_tokens`, and costs `price` an hour."""

    name: str
    step: float
    token: float
    kv_token: float
    kv_tokens: int
    price: float
    block_tokens: int = 1


def replica_kind(
    name: str,
    parameters: float,
    bytes_per_parameter: float,
    kv_bytes_per_token: float,
    gpus: int,
    price: float,
    bandwidth_share: float,
    operations_share: float,
) -> ReplicaKind:
    """A model on `gpus` GPUs of a kind. They share its work evenly, and take no time to exchange results.

    Raises ValueError where the weights leave no room for KV.
    """
    kind = GPU_KINDS[name]
    weights = parameters * bytes_per_parameter
    room = (kind.memory * gpus - weights) * _KV_SHARE
    if room < kv_bytes_per_token:
        raise ValueError(
            f"{weights / 1e9:.1f} GB of weights leave no room for KV on {gpus} x {name} with {kind.memory / 1e9:.0f} GB"
        )
    bandwidth = kind.bandwidth * gpus * bandwidth_share
    return ReplicaKind(
        name=name if gpus == 1 else f"{gpus} x {name}",
        step=weights / bandwidth,
        token=2 * parameters / (kind.operations * gpus * operations_share),
        kv_token=kv_bytes_per_token / bandwidth,
        kv_tokens=int(room / kv_bytes_per_token),
        price=price * gpus,
    )
