"""What a schedule is made of, all of it drawn from one seed: the cell, its load, and what goes wrong when."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from spool.scheduler.config import KvMovement, Policy, SchedulerConfig
from spool.scheduler.key_class import KeyClass
from spool.scheduler.messages import Role
from spool.scheduler.sampling import SamplingParameters
from spool.services.backend.interface import GenerationRequest
from tests.support.paged_model import VOCABULARY, Windows
from tests.support.toy_grammar import draw_grammar

LONGEST_PROMPT = 24
MOST_TOKENS = 8
LONGEST = LONGEST_PROMPT + MOST_TOKENS
MOST_TOKENS_OF_LONG = 60

DRAFT_FAULTS = (
    "draft crash",
    "draft leaves",
    "draft drains",
    "draft hangs",
    "draft freezes",
    "draft slow",
    "draft joins",
    "draft refuses",
    "draft link breaks",
    "draft link one way",
    "draft link slow",
    "proposals disturbed",
    "proposals corrupted",
)
"""What strikes draft workers and their links to targets. None of these may stop a target."""

FAULTS = (
    "worker crash",
    "worker leaves",
    "worker drains",
    "worker stalls",
    "worker slow",
    "scheduler crash",
    "scheduler freezes",
    "two schedulers",
    "gateway crash",
    "partition",
    "reset",
    "delay",
    "duplicate and reorder",
    "lost kv",
    "kv damaged",
    "row trouble",
    "poison",
    *DRAFT_FAULTS,
)

CELL_CRASH = "cell crash"
"""A scheduler and all its workers at once, where there are several cells."""
TRUNCATED = "truncated messages"
DRAFT_CHANGES = "draft changes"
"""The share of a draft's proposals that the target accepts becomes the strength of the fault."""
POISON = "poison"
"""A request that kills every worker that computes it."""
DRAFT_POISON = "draft poison"
"""One that kills every draft worker that computes it."""

LOOKUP, OWN = "lookup", "own"
"""Models of targets that propose themselves: out of the text before, or by a draft of their own."""


_RELEASES = (("",), ("",), ("",), ("",), ("1.0", "2.0"))
"""One for each seed in turn: those of its targets."""

_OWN_DRAFTS = ("", OWN, "", "", LOOKUP, "")
"""One for each seed in turn."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    worker_id: str
    role: Role
    pages: int
    page_size: int
    max_num_batched_tokens: int
    acceptance: float
    base_seconds: float
    row_seconds: float
    cell: int = 0
    kv_seconds: float = 0.0
    """Of a pass, for each position of KV that it reads."""
    own_draft: str = ""
    """Of a target: `LOOKUP`, or `OWN` for a draft that proposes with `acceptance`; empty: draft workers may serve it.
    """
    own_seconds: float = 0.0
    own_row_seconds: float = 0.0
    own_kv_seconds: float = 0.0
    """Of passes of the target's own draft."""
    ahead: bool = False
    """Whether a draft worker proposes before it is asked."""
    release: str = ""
    """Of a target in a cell that is upgraded: its version, which is a part of its fingerprint."""


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """`cancel_after` seconds the client goes away, in one of two ways."""

    number: int
    gateway: int
    arrival: float
    request: GenerationRequest
    cancel_after: float | None
    cancel_abruptly: bool


@dataclass(frozen=True, slots=True)
class Fault:
    time: float
    kind: str
    seconds: float
    pick: float
    """Of [0, 1): whom it hits, among those that are there."""
    strength: float


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    config: SchedulerConfig
    workers: tuple[WorkerPlan, ...]
    gateways: int
    requests: tuple[RequestPlan, ...]
    faults: tuple[Fault, ...]
    latency: float
    horizon: float
    """Until then things go wrong; afterwards everything is mended."""
    register_is_lost: bool
    """Whether the numbers of schedulers begin anew where none lives."""
    cells: int = 1
    longest: int = LONGEST
    """Tokens that a sequence may have."""
    windows: Windows = (None,)
    """Of the models' layers."""

    def victim(self, fault: Fault) -> GenerationRequest:
        """The request that the fault strikes."""
        return self.requests[int(fault.pick * len(self.requests))].request


def make_plan(
    rng: random.Random,
    seed: int,
    sequences: int,
    kinds: tuple[str, ...] = FAULTS,
    served: bool = False,
    cells: int | None = None,
) -> Plan:
    """With `served`, the cell has draft workers, which serve its targets; with `cells`, there are so many."""
    config = SchedulerConfig(
        batch_size=rng.choice((4, 8, 16, 32)),
        max_running=rng.choice((16, 48, 128, 256)),
        policy=rng.choice(tuple(Policy)),
        draft_length=rng.choice((0, 2, 3, 4)),
        prefill_chunk=rng.choice((16, 64, 128)),
        steps_in_flight=rng.choice((1, 2, 2, 3)),
        max_queued_sequences=rng.choice((1000, 1000, 1000, 60)),
        initial_step_seconds=0.01,
        kv_movement=rng.choice(tuple(KvMovement)),
    )
    tight = rng.random() < 0.3
    page_size = rng.choice((1, 2) if tight else (4, 8))
    workers = []
    for role, count in ((Role.TARGET, rng.choice((1, 2, 2, 3))), (Role.DRAFT, rng.choice((0, 1, 1, 2)))):
        for index in range(count):
            lengths = rng.randint(2, 8) if tight else 150
            target = role is Role.TARGET
            own = _OWN_DRAFTS[seed % len(_OWN_DRAFTS)] if target else ""
            releases = _RELEASES[seed % len(_RELEASES)] if target else ("",)
            workers.append(
                WorkerPlan(
                    f"{role.value}{index}",
                    role,
                    lengths * -(-LONGEST // page_size),
                    page_size,
                    rng.choice((64, 256)),
                    rng.choice((0.3, 0.7, 0.9)),
                    0.01 if target else 0.003,
                    0.0001,
                    own_draft=own,
                    own_seconds=0.001 if own == OWN else 0.0,
                    ahead=not target and seed % 2 == 0,
                    release=releases[index % len(releases)],
                )
            )
    gateways = rng.choice((1, 2, 3))
    load_seconds = rng.choice((0.05, 0.4, 1.2))
    # What many prompts begin with; without any, sequences share next to nothing.
    prefixes = tuple(_tokens(rng, rng.randint(1, LONGEST_PROMPT - 4)) for _ in range(rng.choice((0, 1, 1, 3))))
    requests = tuple(_request(rng, number, gateways, load_seconds, prefixes) for number in range(sequences))
    horizon = load_seconds + 0.8
    faults = []
    chosen = rng.sample(kinds, rng.randint(1, min(4, len(kinds)))) if kinds else []
    # Faults that nobody is there for would be none.
    served |= bool(kinds) and set(kinds) <= {*DRAFT_FAULTS, DRAFT_POISON}
    if not served and all(worker.role is Role.TARGET for worker in workers):
        chosen = [kind for kind in chosen if kind not in DRAFT_FAULTS]
    for _ in range(rng.randint(2, 8) if chosen else 0):
        seconds = rng.choice((0.02, 0.2, 1.0, 2.5))
        faults.append(Fault(rng.random() * horizon, rng.choice(chosen), seconds, rng.random(), rng.random()))
    faults.sort(key=lambda fault: fault.time)
    plan = Plan(
        seed,
        config,
        tuple(workers),
        gateways,
        requests,
        tuple(faults),
        latency=rng.choice((0.0005, 0.002, 0.01)),
        horizon=horizon,
        register_is_lost=rng.random() < 0.3,
    )
    # From generators of their own: whatever else is drawn stays what it was before there was any of these.
    for what, share, change in (
        ("API keys of", 0.25, _with_keys),
        ("structured output of", 0.25, _with_grammars),
        ("log probabilities of", 0.25, _with_scores),
        *((("messages of", 0.1, _with_truncated_messages),) if kinds == FAULTS else ()),
        *((("prompts that kill in", 0.125, _with_poisons),) if kinds == FAULTS else ()),
        *((("prompts that kill drafts in", 0.1, _with_draft_poisons),) if kinds == FAULTS else ()),
        ("long answers of", 0.2, _with_long_answers),
        ("windows of", 1 / 3, _with_windows),
        ("limits of", 0.125, _with_small_limits),
    ):
        own = random.Random(f"{what} {seed}")
        if own.random() < share:
            plan = change(plan, own)
    if served:
        plan = _with_drafts(plan)
    return _with_cells(plan, random.Random(f"cells of {seed}"), kinds == FAULTS, cells)


def _with_drafts(plan: Plan) -> Plan:
    """Every target is served by draft workers, and has something to ask them."""
    workers = [replace(worker, own_draft="", own_seconds=0.0) for worker in plan.workers]
    if all(worker.role is Role.TARGET for worker in workers):
        drafts = (replace(workers[0], worker_id=f"draft{index}", role=Role.DRAFT) for index in range(1 + plan.seed % 2))
        workers += [replace(draft, base_seconds=workers[0].base_seconds / 3) for draft in drafts]
    config = replace(plan.config, draft_length=plan.config.draft_length or 3)
    return replace(plan, config=config, workers=tuple(workers))


def _with_keys(plan: Plan, rng: random.Random) -> Plan:
    """Requests come with API keys and priorities, and each key has a cache of its own."""
    keys = tuple(
        KeyClass(
            f"key{number}",
            rng.choice((0.5, 1.0, 2.0, 5.0)),
            max_running=rng.choice((None, None, 2, 8)),
            max_waiting=rng.choice((None, None, 10, 40)),
            tokens_per_minute=rng.choice((None, None, None, 400)),
        )
        for number in range(rng.randint(1, 4))
    )
    # One key may flood the others.
    names = ["", *(key.name for key in keys), *[keys[0].name] * rng.choice((0, 0, 20))]
    requests = tuple(
        replace(
            one,
            request=replace(
                one.request,
                key=(name := rng.choice(names)),
                priority=rng.choice((0, 0, -3, 2, 2**31 - 1)),
                cache_scope=name.encode().ljust(32),
            ),
        )
        for one in plan.requests
    )
    return replace(plan, config=replace(plan.config, keys=keys), requests=requests)


def _with_grammars(plan: Plan, rng: random.Random) -> Plan:
    """Some outputs or all of them have to follow one of a few grammars."""
    grammars = [draw_grammar(rng) for _ in range(rng.randint(1, 6))]
    share = rng.choice((0.2, 0.6, 1.0))
    requests = []
    for one in plan.requests:
        if rng.random() < share:
            grammar = rng.choice(grammars)
            stops = one.request.stop_token_ids | grammar.end_token_ids
            sampling = SamplingParameters(grammar=grammar)
            one = replace(one, request=replace(one.request, sampling=sampling, stop_token_ids=stops))
        requests.append(one)
    return replace(plan, requests=tuple(requests))


def _with_scores(plan: Plan, rng: random.Random) -> Plan:
    """Every third request wants the log probabilities of its prompt."""
    requests = tuple(
        replace(one, request=replace(one.request, prompt_logprobs=0)) if rng.random() < 0.3 else one
        for one in plan.requests
    )
    return replace(plan, requests=requests)


def _with_truncated_messages(plan: Plan, rng: random.Random) -> Plan:
    return _adding(plan, [Fault(rng.random() * plan.horizon, TRUNCATED, rng.choice((0.2, 1.0, 2.5)), *_two(rng))])


def _with_poisons(plan: Plan, rng: random.Random) -> Plan:
    """There are poisons, sometimes beside a rolling restart: one worker after the other goes, and comes anew."""
    faults = [
        Fault(0.5 * plan.horizon * rng.random(), POISON, rng.choice((0.02, 0.2, 1.0)), *_two(rng))
        for _ in range(rng.randint(1, 3))
    ]
    if rng.random() < 0.3:
        kind, pause = rng.choice(("worker leaves", "worker drains")), rng.choice((0.1, 0.3))
        start, down = 0.3 * rng.random(), rng.choice((0.02, 0.2))
        count = len(plan.workers)
        faults += [Fault(start + place * pause, kind, 0.2, (place + 0.5) / count, down) for place in range(count)]
    return _adding(plan, faults)


def _with_draft_poisons(plan: Plan, rng: random.Random) -> Plan:
    faults = [
        Fault(0.5 * plan.horizon * rng.random(), DRAFT_POISON, rng.choice((0.02, 0.2, 1.0)), *_two(rng))
        for _ in range(rng.randint(1, 2))
    ]
    return _adding(plan, faults)


def _with_long_answers(plan: Plan, rng: random.Random) -> Plan:
    """One of four answers is long, so that drafting has time to pay."""
    longest = LONGEST_PROMPT + MOST_TOKENS_OF_LONG
    requests = tuple(
        replace(one, request=replace(one.request, max_tokens=rng.randint(MOST_TOKENS, MOST_TOKENS_OF_LONG)))
        if one.request.max_tokens <= MOST_TOKENS and rng.random() < 0.25
        else one
        for one in plan.requests
    )
    workers = tuple(replace(worker, pages=-(-longest // LONGEST) * worker.pages) for worker in plan.workers)
    return replace(plan, requests=requests, workers=workers, longest=longest)


def _with_windows(plan: Plan, rng: random.Random) -> Plan:
    """Models have layers with sliding windows."""
    windows: Windows = rng.choice(((None, 4), (None, 9, 9, 9), (3,), (None, None, 7), (None, 2, 11)))
    kinds = len(set(windows))
    workers = tuple(replace(worker, pages=kinds * worker.pages) for worker in plan.workers)
    return replace(plan, windows=windows, workers=workers)


def _with_small_limits(plan: Plan, rng: random.Random) -> Plan:
    """Steps are short and have room for few tokens."""
    config = replace(
        plan.config,
        batch_size=rng.choice((1, 2, 3, 6)),
        max_running=rng.choice((3, 8, 64)),
        prefill_chunk=rng.choice((1, 2, 5)),
    )
    workers = tuple(
        replace(worker, max_num_batched_tokens=rng.choice((2, 3, 8, 24)), base_seconds=0.001) for worker in plan.workers
    )
    return replace(plan, config=config, workers=workers)


def _with_cells(plan: Plan, rng: random.Random, all_faults: bool, count: int | None) -> Plan:
    """In one of eight schedules with all faults there are two or three cells, with as many workers each. In half of
    these, whole ones die."""
    cells = count or (rng.choice((2, 2, 3)) if all_faults and rng.random() < 0.125 else 1)
    if cells == 1:
        return plan
    workers = tuple(
        replace(worker, worker_id=f"cell{cell}{worker.worker_id}" if cell else worker.worker_id, cell=cell)
        for cell in range(cells)
        for worker in plan.workers
    )
    crashes = [
        Fault(rng.random() * plan.horizon, CELL_CRASH, rng.choice((0.2, 1.0, 2.5)), *_two(rng))
        for _ in range(rng.choice((0, 0, 1, 2)) if all_faults else 0)
    ]
    return _adding(replace(plan, cells=cells, workers=workers), crashes)


def _adding(plan: Plan, faults: list[Fault]) -> Plan:
    return replace(plan, faults=tuple(sorted((*plan.faults, *faults), key=lambda fault: fault.time)))


def _two(rng: random.Random) -> tuple[float, float]:
    return rng.random(), rng.random()


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    # Quicker than a call for each token.
    bits = rng.getrandbits(6 * count)
    return tuple((bits >> 6 * place) % VOCABULARY for place in range(count))


def _request(
    rng: random.Random, number: int, gateways: int, load_seconds: float, prefixes: tuple[tuple[int, ...], ...]
) -> RequestPlan:
    bits = rng.getrandbits(16)
    prompt = _tokens(rng, rng.randint(1, LONGEST_PROMPT))
    if prefixes and bits & 3:
        prefix = prefixes[bits % len(prefixes)]
        # Some end within what they share: it is all that they have.
        prompt = (prefix + prompt[: 1 + (bits >> 2) % 4]) if bits & 12 else prefix[: len(prompt)]
    most_tokens = rng.randint(1, MOST_TOKENS)
    odd = rng.random()
    if odd < 0.01:
        most_tokens = 100_000
    chance = rng.random()
    cancel_after = rng.choice((0.0, 0.01, 0.1, 0.5)) * rng.random() if chance < 0.06 else None
    return RequestPlan(
        number,
        rng.randrange(gateways),
        rng.random() * load_seconds,
        GenerationRequest(
            prompt,
            most_tokens,
            stop_token_ids=frozenset((bits % VOCABULARY, (bits >> 8) % VOCABULARY)) if odd > 0.8 else frozenset(),
            draft_length=(0, 1, 5)[bits % 3] if 0.7 < odd < 0.8 else None,
            deadline_seconds=rng.choice((0.02, 0.3, 3.0)) if 0.06 < chance < 0.1 else None,
        ),
        cancel_after,
        rng.random() < 0.5,
    )
