"""A worker that takes a GPU's time and computes nothing: run by `python -m bench.control_plane`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from random import Random

from bench.core_speed import Pace
from spool.engine.description import EngineDescription
from spool.engine.drafting.inside_target import InsideDrafting
from spool.engine.drafting.model_drafting import ModelDrafting
from spool.engine.drafting.proposer import Proposers
from spool.engine.kv.pages import PagePool
from spool.engine.steps import (
    Computing,
    EngineTimings,
    Interrupted,
    ProposeRow,
    RowOutcome,
    StepOutcome,
    VerifyRow,
    no_callback,
)
from spool.scheduler.messages import Role
from spool.services.worker.drafting.remote import RemoteProposer
from spool.services.worker.executor import StepExecutor
from spool.services.worker.process import (
    Progress,
    Serve,
    WorkerArguments,
    parse_arguments,
    run_worker,
    serving,
    serving_draft,
)

MAX_LENGTH = 16384
_PAGE_SIZE = 16
_PAGES = 1 << 18
_TOKEN, _SECOND, _OTHER = 7, 8, 9
# Sleeping ends late by about so much; the rest is waited for actively.
_OVERSLEPT_SECONDS = 0.0002


class PacedEngine:
    """The draft always chooses the same token, and the same in its place. Each is the target's own with the chance
    `agreement`, given those before it; if not, what is in its place is with the chance `second`."""

    device_lost = False

    def __init__(self, pace: Pace, agreement: float, second: float, batch: int, own_draft_id: str = "") -> None:
        self._pace = pace
        self._agreement = agreement
        self._second = second
        self._random = Random()  # one seed would give all turns the same luck
        self.pool = PagePool(_PAGES, _PAGE_SIZE)
        self.description = EngineDescription(
            model_id="paced",
            tokenizer_digest=b"paced",
            vocabulary_size=_OTHER + 1,
            dtype="none",
            device="none",
            page_size=_PAGE_SIZE,
            total_pages=_PAGES,
            max_sequence_length=MAX_LENGTH,
            max_num_batched_tokens=max(2048, 8 * batch),
            own_draft_id=own_draft_id,
        )


class PacedTarget(PacedEngine):
    def step(self, rows: Sequence[VerifyRow], computing: Computing = no_callback) -> StepOutcome:
        began = time.perf_counter()
        computing()
        seconds = self._pace.seconds(Role.TARGET, ((len(row.tokens) + len(row.draft_tokens), 0) for row in rows))
        outcomes = [self._outcome(row) for row in rows]
        _wait_until(began + seconds)
        return StepOutcome(outcomes, EngineTimings(forward=time.perf_counter() - began))

    def _outcome(self, row: VerifyRow) -> RowOutcome:
        accepted = 0
        while accepted < len(row.draft_tokens) and self._random.random() < self._agreement:
            accepted += 1
        self.pool.append(row.table, len(row.tokens) + accepted)
        if not row.sample:
            return RowOutcome([])
        if accepted == len(row.draft_tokens) and self._random.random() < self._agreement:
            own = _TOKEN
        else:
            own = _SECOND if self._random.random() < self._second else _OTHER
        return RowOutcome([*[_TOKEN] * accepted, own], accepted)


class PacedDraft(PacedEngine):
    def step(
        self,
        rows: Sequence[ProposeRow],
        computing: Computing = no_callback,
        interrupted: Interrupted | None = None,
    ) -> StepOutcome:
        began = end = time.perf_counter()
        computing()
        done = 0
        for seconds in self._pace.passes(Role.DRAFT, [(len(row.tokens), row.draft_length) for row in rows]):
            end += seconds
            if interrupted is not None:
                time.sleep(max(0.0, end - time.perf_counter()))  # what is slept too long is not by the next pass
            done += 1
            if interrupted is not None and interrupted():
                break
        _wait_until(end)
        outcomes = []
        for row in rows:
            proposed = min(row.draft_length, done)
            self.pool.append(row.table, len(row.tokens) + max(0, proposed - 1))
            outcomes.append(RowOutcome([_TOKEN] * proposed, alternatives=[_SECOND] * proposed))
        return StepOutcome(outcomes, EngineTimings(forward=time.perf_counter() - began))


def _wait_until(end: float) -> None:
    left = end - time.perf_counter() - _OVERSLEPT_SECONDS
    if left > 0:
        time.sleep(left)
    while time.perf_counter() < end:
        time.sleep(0)


def load(arguments: WorkerArguments, progress: Progress) -> Serve:
    """A target drafts by itself with `inside`; otherwise a draft worker may serve it."""
    settings = arguments.settings
    given = Pace(**settings["pace"]), settings["agreement"], settings["second"], settings["batch"]
    if arguments.role is Role.DRAFT:
        return serving_draft(PacedDraft(*given), prefix_cache=False, ahead=settings["ahead"])
    if settings["inside"]:
        own = InsideDrafting(ModelDrafting(PacedDraft(*given), prefix_cache=False))
        return serving(StepExecutor(PacedTarget(*given, "paced"), proposer=Proposers(draft=own)))
    target = PacedTarget(*given)
    remote = RemoteProposer(target.description.vocabulary_size, arguments.security)
    return serving(StepExecutor(target, proposer=Proposers(draft=remote), remote=remote))


if __name__ == "__main__":
    sys.exit(run_worker(parse_arguments(), load))
