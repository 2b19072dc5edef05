"""Does attention give a query row the same bits whatever shares the call with it? JSON on the last line.

For the fused kernel and for plain matrix products, and for two rules on the KV length of calls: the share of
comparisons that were bit-equal, of the last row of a call of many rows with the same row in a call of its own. Why
exact mode multiplies matrices (docs/exactness.md).
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

KV_HEADS, HEAD_DIM, LONGEST, MAX_ROWS = 3, 64, 1024, 192
_LADDER = (128, 256, 384, 512, 768)

KvLength = Callable[[int, int], int]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def fixed_by_position(position: int, _last: int) -> int:
    return next((n for n in _LADDER if position < n), LONGEST)


def whole_pages(_position: int, last: int) -> int:
    """Of 16 positions, up to the last position in the call: what sharing a call with longer sequences does."""
    return -(-(last + 1) // 16) * 16


@functools.lru_cache
def inputs(group: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values `[1, kv_heads, LONGEST, head_dim]`, queries `[LONGEST, kv_heads, group, head_dim]`."""
    generator = torch.Generator().manual_seed(group)
    keys, values = (torch.randn(1, KV_HEADS, LONGEST, HEAD_DIM, generator=generator).to(dtype) for _ in range(2))
    return keys, values, torch.randn(LONGEST, KV_HEADS, group, HEAD_DIM, generator=generator).to(dtype)


def fused(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)


def products(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = torch.baddbmm(mask.expand(KV_HEADS, -1, -1), queries[0], keys[0].transpose(1, 2), alpha=HEAD_DIM**-0.5)
    return torch.bmm(torch.softmax(scores, -1), values[0])[None]


def last_row(attend: Attend, first: int, last: int, kv_length: int, group: int, dtype: torch.dtype) -> torch.Tensor:
    """Output `[kv_heads, group, head_dim]` of the row at `last` in a call of the rows from `first` to it."""
    keys, values, queries = inputs(group, dtype)
    rows = last - first + 1
    positions = torch.arange(first, last + 1)
    packed = queries[positions].permute(1, 0, 2, 3).reshape(1, KV_HEADS, rows * group, HEAD_DIM)
    hidden = torch.arange(kv_length) > positions[:, None]
    mask = torch.zeros(rows, kv_length, dtype=dtype).masked_fill(hidden, float("-inf")).repeat_interleave(group, 0)
    out = attend(packed, keys[:, :, :kv_length], values[:, :, :kv_length], mask)
    return out.view(KV_HEADS, rows, group, HEAD_DIM)[:, -1]


def equal_share(attend: Attend, kv_length: KvLength, group: int, dtype: torch.dtype, trials: int) -> float:
    rng = random.Random(0)
    equal = 0
    for _ in range(trials):
        last = rng.randrange(LONGEST)
        rows = rng.randint(2, MAX_ROWS)
        # Where the position fixes the length, rows with another one are in another call.
        first = next(p for p in range(max(0, last - rows), last + 1) if kv_length(p, last) == kv_length(last, last))
        length_together = kv_length(last, min(LONGEST - 1, last + rng.randrange(64)))
        together = last_row(attend, first, last, length_together, group, dtype)
        equal += torch.equal(together, last_row(attend, last, last, kv_length(last, last), group, dtype))
    return equal / trials


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=2000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shares = {
        f"{str(dtype).removeprefix('torch.')}, {group} query heads per KV head": {
            f"{attend.__name__}, KV length {rule.__name__}": equal_share(attend, rule, group, dtype, arguments.trials)
            for attend in (fused, products)
            for rule in (whole_pages, fixed_by_position)
        }
        for dtype in (torch.bfloat16, torch.float32)
        for group in (1, 3)
    }
    for shape, rules in shares.items():
        for rule, share in rules.items():
            print(f"{shape}: {rule}: {share:.4f}", file=sys.stderr)
    print(json.dumps({"bit_equal_share": shares, "trials": arguments.trials}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
