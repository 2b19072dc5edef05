"""Weights in groups of few bits: the one form that every quantised checkpoint is brought to when it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

GROUPS = (16, 32)
"""Inputs that may share a scale."""
INPUT_MULTIPLE = 32
"""The inputs of a weight are a multiple of these."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight `[out, in]` whose numbers are `scale * code + minimum`, in float32.

    `codes` uint8 `[out, in * bits / 8]`: with 4 bits, a byte holds the codes of two neighbouring inputs, the first in
    its lower half. `scales` and `minimums` float32 `[out, in / group]`. `bits` is 4 or 8, `group` one of `GROUPS`.
    Raises ValueError for tensors that do not fit.
    """

    bits: int
    group: int
    codes: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or self.group not in GROUPS:
            raise ValueError(f"bits is {self.bits} and group {self.group}, must be 4 or 8 and one of {GROUPS}")
        out, inputs = self.shape
        expected = (out, inputs // self.group)
        if inputs % INPUT_MULTIPLE or self.scales.shape != expected or self.minimums.shape != expected:
            raise ValueError(
                f"a weight of {out} outputs and {inputs} inputs has scales {list(self.scales.shape)} and minimums "
                f"{list(self.minimums.shape)}, must have {list(expected)} and a multiple of {INPUT_MULTIPLE} inputs"
            )

    @classmethod
    def of_codes(
        cls, codes: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor, bits: int, group: int = 32
    ) -> Self:
        """Of codes uint8 `[out, in]`, each below `2 ** bits`."""
        packed = codes[:, ::2] | codes[:, 1::2] << 4 if bits == 4 else codes
        return cls(bits, group, packed.contiguous(), scales.float().contiguous(), minimums.float().contiguous())

    @property
    def shape(self) -> tuple[int, int]:
        out, size = self.codes.shape
        return out, size * 8 // self.bits

    def unpacked(self) -> torch.Tensor:
        """Codes, uint8 `[out, in]`."""
        if self.bits == 8:
            return self.codes
        return torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(1)

    def expanded(self) -> torch.Tensor:
        """The numbers, float32 `[out, in]`."""
        codes = self.unpacked().view(self.shape[0], -1, self.group).float()
        return (codes * self.scales.unsqueeze(-1) + self.minimums.unsqueeze(-1)).flatten(1)

    def rows(self, which: torch.Tensor) -> Self:
        """The weight of some outputs, in the order of `which` (int64)."""
        return type(self)(self.bits, self.group, self.codes[which], self.scales[which], self.minimums[which])


Weight = torch.Tensor | QuantizedWeight


def joined_weights(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Outputs of all, one after the other. The numbers stay what they are: fewer bits and larger groups fit into more
    bits and smaller groups."""
    bits, group = max(weight.bits for weight in weights), min(weight.group for weight in weights)
    codes = [weight.codes if weight.bits == bits else weight.unpacked() for weight in weights]
    scales = [weight.scales.repeat_interleave(weight.group // group, dim=1) for weight in weights]
    minimums = [weight.minimums.repeat_interleave(weight.group // group, dim=1) for weight in weights]
    return QuantizedWeight(bits, group, torch.cat(codes), torch.cat(scales), torch.cat(minimums))
