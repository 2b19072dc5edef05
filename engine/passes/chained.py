"""Proposals whose passes feed themselves: the tokens stay on the device until all of them are chosen.

A host that reads each token before it starts the next pass leaves a GPU idle meanwhile, once for every token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from spool.engine.passes.admission import split_by_rows
from spool.engine.passes.device import PassClock, current, on_device
from spool.engine.passes.layout import BatchedSequence
from spool.engine.passes.runner import ModelRunner
from spool.engine.sampling.context import SamplingContext
from spool.engine.sampling.logits_scan import LogitsScan
from spool.engine.sampling.sampler import choose_alternatives, choose_tokens
from spool.engine.steps import Computing, EngineTimings, Interrupted

GoesOn = Callable[[int, int], bool]
"""Of a sequence's place and the number of tokens chosen for it: whether it feeds the last one and wants another, for
which room is made then."""

ContextAfter = Callable[[int, int], SamplingContext]
"""Of a sequence's place and the number of tokens chosen for it: how the next one is sampled."""


class ChainedPasses:
    def __init__(
        self,
        runner: ModelRunner,
        max_num_batched_tokens: int,
        vocabulary_size: int,
        scan: LogitsScan,
        token_ids: Tensor | None,
    ) -> None:
        """`token_ids` as in `sample_tokens`."""
        self._runner = runner
        self._max_num_batched_tokens = max_num_batched_tokens
        self._vocabulary_size = vocabulary_size
        self._scan = scan
        self._token_ids = token_ids

    @torch.inference_mode()
    def run(
        self,
        sequences: Sequence[BatchedSequence],
        context_after: ContextAfter,
        goes_on: GoesOn,
        timings: EngineTimings,
        computing: Computing,
        alternatives: bool = False,
        interrupted: Interrupted | None = None,
    ) -> list[list[tuple[int, int]]]:
        """Feeds the sequences, and then token by token those that want logits, as long as they go on. Gives the tokens
        chosen for each, negative from the first on whose logits are not finite, and beside each its alternative
        (`RowOutcome`), or -1.

        `computing` is called for each pass. The host waits once, at the end; where it may be `interrupted`, no more
        than two passes are on their way.
        """
        device = self._runner.model.device
        chosen: list[list[tuple[int, int]]] = [[] for _ in sequences]
        found: list[tuple[list[int], Tensor, Tensor]] = []
        places, feeding, fed, clock = list(range(len(sequences))), list(sequences), None, None
        before: PassClock | None = None
        while feeding:
            parts: list[Tensor] = []
            others: list[Tensor] = []
            sizes = [len(sequence.tokens) for sequence in feeding]
            wanted = [sequence.logits for sequence in feeding]
            limits = self._max_num_batched_tokens, self._runner.max_logits
            for batch in split_by_rows(range(len(feeding)), sizes, wanted, *limits):
                first, last = batch[0], batch[-1]
                result = self._runner.run(
                    feeding[first : last + 1], computing, None if fed is None else fed[first : last + 1]
                )
                clock = clock or result.clock
                if found:
                    # The device computes the pass before while the host prepares this one.
                    result.timings.prepare = result.timings.realign = 0.0
                timings.add(result.timings)
                if len(result.logits):
                    logits = result.logits[:, : self._vocabulary_size]
                    contexts = [context_after(places[index], len(found)) for index in batch if feeding[index].logits]
                    parts.append(choose_tokens(logits, contexts, self._token_ids, self._scan))
                    if alternatives:
                        others.append(choose_alternatives(logits, contexts, parts[-1], self._token_ids, self._scan))
            places = [place for place, sequence in zip(places, feeding, strict=True) if sequence.logits]
            if not places:
                break
            tokens = parts[0] if len(parts) == 1 else torch.cat(parts)
            found.append((places, tokens, torch.cat(others) if others else torch.full_like(tokens, -1)))
            if interrupted is not None:
                if before is not None:
                    before.wait()
                before = result.clock
                if interrupted():
                    break
            going = [index for index, place in enumerate(places) if goes_on(place, len(found))]
            fed = tokens.clamp(min=0)
            if len(going) < len(places):
                fed, places = fed[on_device(going, device)], [places[index] for index in going]
            feeding = [BatchedSequence(sequences[place].table, [0], 1) for place in places]
        if clock is None:
            return chosen
        with current(device):
            clock.computed()
        if found:
            each_places, each_tokens, each_others = zip(*found, strict=True)
            pairs = torch.stack((torch.cat(each_tokens), torch.cat(each_others)), 1).tolist()
            for place, (token, other) in zip(chain(*each_places), pairs, strict=True):
                chosen[place].append((token, other))
        timings.add_pass(*clock.seconds())
        return chosen
