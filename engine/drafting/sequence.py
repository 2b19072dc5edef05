"""What a target's worker keeps of one sequence for whoever proposes for it. Knows no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from spool.engine.drafting.draft_kv import DraftKv
from spool.engine.drafting.lookup.prompt_lookup import TokenPlaces
from spool.engine.drafting.lookup.text_store import TextPlace
from spool.scheduler.messages import ProposalSource


@dataclass(slots=True, eq=False)
class SequenceDrafting:
    """The output that is `expected`, from the end of the prompt on; the latest proposal made in this process, for the
    prefix with this `digest`, and the `source` of that, or of what was taken instead; for prompt lookup, where tokens
    stand, and where the sequence stands among other texts; the KV of a draft inside."""

    sequence_id: int = 0
    cache_scope: bytes = b""
    expected: Sequence[int] = ()
    kv: DraftKv = field(default_factory=DraftKv)
    places: TokenPlaces = field(default_factory=TokenPlaces)
    text: TextPlace = field(default_factory=TextPlace)
    proposal: Sequence[int] = ()
    digest: int = 0
    source: ProposalSource = ProposalSource.DRAFT

    def keep(self, digest: int, proposal: Sequence[int], source: ProposalSource = ProposalSource.DRAFT) -> None:
        self.digest, self.proposal, self.source = digest, proposal, source

    def kept(self, digest: int, most: int) -> Sequence[int]:
        """Up to `most` tokens after the prefix; empty where none are kept for it."""
        return self.proposal[:most] if digest == self.digest else ()

    def truncate(self, length: int) -> None:
        """The target's history changes from `length` on."""
        self.kv.truncate(length)
        self.places.truncate(length)
        self.text.truncate(length)
