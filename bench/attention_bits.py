"""Does fused attention give a query row the same bits whatever shares the call with it? JSON on the last line.

For each rule on the shapes of calls, the share of comparisons that were bit-equal: a row attended by itself in the
smallest call the rule allows, against the same row in larger calls. What exact mode relies on (docs/exactness.md).
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows)

KV_HEADS, HEAD_DIM, LONGEST = 3, 64, 1536
_LADDER = (128, 256, 384, 512)


def fixed_length(position: int, _last: int) -> int:
    """KV length from the position of the row alone."""
    return next((n for n in _LADDER if position < n), -(-(position + 1) // 512) * 512)


def padded_to_pages(_position: int, last: int) -> int:
    """KV length from the last position in the call, in whole pages of 16: what sharing a call with others does."""
    return -(-(last + 1) // 16) * 16


@functools.lru_cache
def inputs(group: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values `[1, kv_heads, LONGEST, head_dim]`, queries `[LONGEST, kv_heads, group, head_dim]`."""
    generator = torch.Generator().manual_seed(group)
    keys, values = (torch.randn(1, KV_HEADS, LONGEST, HEAD_DIM, generator=generator).to(dtype) for _ in range(2))
    return keys, values, torch.randn(LONGEST, KV_HEADS, group, HEAD_DIM, generator=generator).to(dtype)


def attend(position: int, rows: int, kv_length: int, sequences: int, group: int, dtype: torch.dtype) -> torch.Tensor:
    """Output `[kv_heads, group, head_dim]` of the row at `position`, the first of `rows` in a call."""
    keys, values, queries = inputs(group, dtype)
    packed = queries[position : position + rows].permute(1, 0, 2, 3).reshape(1, KV_HEADS, rows * group, HEAD_DIM)
    hidden = torch.arange(kv_length) > torch.arange(position, position + rows)[:, None]
    mask = torch.zeros(rows, kv_length, dtype=dtype).masked_fill(hidden, float("-inf"))
    out = F.scaled_dot_product_attention(
        packed.expand(sequences, -1, -1, -1),
        keys[:, :, :kv_length].expand(sequences, -1, -1, -1).contiguous(),
        values[:, :, :kv_length].expand(sequences, -1, -1, -1).contiguous(),
        attn_mask=mask.repeat_interleave(group, 0).expand(sequences, 1, -1, -1),
    )
    return out[-1].view(KV_HEADS, rows, group, HEAD_DIM)[:, 0]


def equal_share(
    kv_length: Callable[[int, int], int], least_rows: int, group: int, dtype: torch.dtype, trials: int
) -> float:
    rng = random.Random(0)
    equal = compared = 0
    for _ in range(trials):
        position = rng.randrange(4, 1100)
        alone = attend(position, least_rows, kv_length(position, position + least_rows - 1), 1, group, dtype)
        for rows in (1, 2, 3, 5, 8, 24):
            rows = max(rows, least_rows)
            for sequences in (1, 4):
                length = kv_length(position, position + rows - 1)
                # A call never reaches past its KV length: rows beyond it belong to the next call.
                rows_in_call = max(least_rows, min(rows, length - position))
                other = attend(position, rows_in_call, length, sequences, group, dtype)
                equal += torch.equal(alone, other)
                compared += 1
    return equal / compared


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=60)
    arguments = parser.parse_args()
    shares = {
        f"{str(dtype).removeprefix('torch.')}, {group} query heads per KV head": {
            f"{rule.__name__}, at least {least} rows": equal_share(rule, least, group, dtype, arguments.trials)
            for rule in (padded_to_pages, fixed_length)
            for least in (1, 2, 4)
        }
        for dtype in (torch.bfloat16, torch.float32)
        for group in (1, 3, 4)
    }
    for shape, rules in shares.items():
        for rule, share in rules.items():
            print(f"{shape}: {rule}: {share:.4f}", file=sys.stderr)
    print(json.dumps({"bit_equal_share": shares, "trials": arguments.trials}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
