"""How the heads of attention are divided among ranks. No torch."""

from __future__ import annotations


def heads_of_a_rank(heads: int, kv_heads: int, size: int) -> tuple[int, int]:
    """Query heads and KV heads that each of `size` ranks computes; a KV head is on the rank of its queries.

    KV heads that cannot be divided evenly are rounded up. Where there are fewer than ranks, several ranks have one.
    """
    if kv_heads < size:
        return heads // size, 1
    own_kv_heads = -(-kv_heads // size)
    return own_kv_heads * (heads // kv_heads), own_kv_heads
