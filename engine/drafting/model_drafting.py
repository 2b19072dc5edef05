"""One draft model and the KV of the sequences that it drafts for: inside a target's process, or in a draft worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.drafting.draft_kv import DraftKv
from scheduler.sampling import SamplingParameters


@dataclass(slots=True)
class DraftAsk:
    """Propose up to `draft_length` tokens (0: only compute KV) after `history` and the tokens `sampled` behind it, of
    which the last was not fed to the target."""

    kv: DraftKv
    history: Sequence[int]
    sampled: Sequence[int]
    prompt_length: int
    sampling: SamplingParameters
    draft_length: int


@dataclass(slots=True)
class DraftAnswer:
    """`behind` counts the tokens whose KV is still missing: ask again for them. Once `refused`, the sequence gets no
    proposal any more."""

    tokens: Sequence[int] = ()
    behind: int = 0
    refused: bool = False
