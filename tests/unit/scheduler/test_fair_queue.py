"""Who is admitted next, against a list of everybody that is searched from end to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.key_class import KeyClass
from scheduler.messages import SequenceRequest
from scheduler.state import workers
from scheduler.state.live_set import LiveSet

# Weights by which numbers of tokens divide without a rest, so that the order of sums does not matter.
KEYS = (
    KeyClass("a"),
    KeyClass("b", weight=2.0),
    KeyClass("c", weight=0.5, max_running=2),
    KeyClass("d", max_running=1),
)
ACCOUNTS = ("a", "b", "c", "d", "")
NAMES = ("a", "b", "c", "d", "", "nobody configured this")


@dataclass
class PlainQueue:
    """The rules by themselves: no heap, everything is looked for anew."""

    served: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ACCOUNTS, 0.0))
    claimed: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ACCOUNTS, 0.0))
    waiting: list[tuple[str, int, int]] = field(default_factory=list)
    """(key, priority, order)"""
    running: list[tuple[str, int, int]] = field(default_factory=list)
    competing: list[str] = field(default_factory=list)
    """The one that began last is first."""
    last: str | None = None

    def first(self) -> tuple[str, int, int] | None:
        if not self.competing:
            return None
        key = min(self.competing, key=lambda name: self.claimed[name])
        return min((one for one in self.waiting if one[0] == key), key=lambda one: one[1:])

    def serve(self, key: str, tokens: int) -> None:
        self.served[key] += tokens / {"b": 2.0, "c": 0.5}.get(key, 1.0)

    def claim(self, key: str, tokens: int) -> None:
        self.claimed[key] += tokens / {"b": 2.0, "c": 0.5}.get(key, 1.0)

    def settle(self) -> None:
        """Notes who has begun to compete and who has stopped."""
        most = {"c": 2, "d": 1}
        for key in self.served:
            wants = any(one[0] == key for one in self.waiting)
            may = sum(one[0] == key for one in self.running) < most.get(key, 10**6)
            if wants and may and key not in self.competing:
                first = min(self.competing, key=lambda name: self.claimed[name], default=self.last)
                if first is not None and self.served[first] > self.served[key]:
                    self.claimed[key] += self.served[first] - self.served[key]
                    self.served[key] = self.served[first]
                self.competing.insert(0, key)
            elif not (wants and may) and key in self.competing:
                self.competing.remove(key)
                self.last = key


class Both:
    """A live set and the plain queue, which must name the same sequence after each operation."""

    def __init__(self) -> None:
        self.live = LiveSet(KEYS)
        self.plain = PlainQueue()
        self.known: dict[int, workers.Sequence] = {}

    def submit(self, name: str, priority: int, prompt: int) -> None:
        order = self.live.next_order()
        request = SequenceRequest(order, (1,) * prompt, 50, key=name, priority=priority)
        sequence = workers.Sequence(request, order, self.live.accounts.of(name))
        self.known[order] = self.live.sequences[order] = sequence
        self.live.waiting.push(sequence)
        self.plain.waiting.append((name if name in self.plain.served else "", priority, order))

    def admit(self) -> None:
        first = self.plain.first()
        if first is None:
            return
        sequence = self.known[first[2]]
        self.live.start(sequence)
        self.plain.waiting.remove(first)
        self.plain.settle()
        self.plain.claim(first[0], sequence.prompt_left)
        self.plain.running.append(first)

    def prefill(self, place: int, tokens: int) -> None:
        key, _, order = self.plain.running[place % len(self.plain.running)]
        sequence = self.known[order]
        tokens = min(tokens, sequence.prompt_left)
        sequence.prompt_left -= tokens
        sequence.account.serve_prompt(tokens)
        self.plain.serve(key, tokens)

    def commit(self, place: int, tokens: int) -> None:
        key, _, order = self.plain.running[place % len(self.plain.running)]
        self.known[order].account.serve_output(tokens, 0.0)
        self.plain.serve(key, tokens)
        self.plain.claim(key, tokens)

    def end(self, place: int, returns: bool) -> None:
        one = self.plain.running.pop(place % len(self.plain.running))
        sequence = self.known[one[2]]
        self.live.stop(sequence)
        self.plain.claim(one[0], -sequence.prompt_left)
        if returns:
            self.plain.settle()
            self.live.waiting.push(sequence)
            self.plain.waiting.append(one)
        else:
            del self.live.sequences[one[2]]

    def cancel(self, place: int) -> None:
        one = self.plain.waiting.pop(place % len(self.plain.waiting))
        self.live.waiting.remove(self.known[one[2]])
        del self.live.sequences[one[2]]

    def check(self) -> None:
        self.plain.settle()
        first = self.live.waiting.first()
        expected = self.plain.first()
        assert (None if first is None else first.order) == (None if expected is None else expected[2])
        served = {account.key.name: account.served for account in self.live.accounts}
        assert served == self.plain.served
        assert {account.key.name: account.claimed for account in self.live.accounts} == self.plain.claimed
        self.live.check_integrity()


NUMBERS = st.integers(0, 1000)
OPERATIONS = st.one_of(
    st.tuples(st.just("submit"), st.sampled_from(NAMES), st.integers(-1, 1), st.integers(1, 40)),
    st.tuples(st.just("admit")),
    st.tuples(st.just("admit")),
    st.tuples(st.just("prefill"), NUMBERS, st.integers(1, 20)),
    st.tuples(st.just("commit"), NUMBERS, st.integers(1, 8)),
    st.tuples(st.just("end"), NUMBERS, st.booleans()),
    st.tuples(st.just("cancel"), NUMBERS),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(OPERATIONS, max_size=80))
def test_the_queue_names_whom_a_search_would_name(operations: Sequence[tuple[object, ...]]) -> None:
    both = Both()
    for name, *arguments in operations:
        if name in ("prefill", "commit", "end") and not both.plain.running:
            continue
        if name == "cancel" and not both.plain.waiting:
            continue
        operation: Callable[..., None] = getattr(both, str(name))
        operation(*arguments)
        both.check()


class Saturated:
    """A cell with so many slots, whose sequences get a token each in every turn, and always more of them wait."""

    def __init__(self, *keys: KeyClass, slots: int = 12) -> None:
        self.live = LiveSet(keys)
        self.slots = slots
        self.ends: dict[int, int] = {}

    def submit(self, name: str, prompt: int, output: int, priority: int = 0) -> workers.Sequence:
        order = self.live.next_order()
        request = SequenceRequest(order, (1,) * prompt, output, key=name, priority=priority)
        sequence = workers.Sequence(request, order, self.live.accounts.of(name))
        self.live.sequences[order] = sequence
        self.live.waiting.push(sequence)
        return sequence

    def turn(self) -> list[workers.Sequence]:
        """Returns whom it admitted."""
        admitted = []
        while len(self.live.running) < self.slots and (sequence := self.live.waiting.first()) is not None:
            self.live.start(sequence)
            self.ends[sequence.order] = sequence.request.max_tokens
            admitted.append(sequence)
        for sequence in list(self.live.running.values()):
            sequence.account.serve_prompt(sequence.prompt_left)
            sequence.prompt_left = 0
            sequence.account.serve_output(1, 0.0)
            self.ends[sequence.order] -= 1
            if not self.ends[sequence.order]:
                self.live.stop(sequence)
                del self.live.sequences[sequence.order]
        return admitted

    def tokens(self) -> dict[str, int]:
        return {one.key.name: one.prompt_tokens + one.output_tokens for one in self.live.accounts}


def test_tokens_are_shared_by_weight_whatever_the_length_of_requests() -> None:
    """Within twice what the slots can hold: the kind of bound that the paper proves for keys with a backlog."""
    cell = Saturated(KeyClass("one"), KeyClass("three", weight=3.0))
    shapes = {"one": (3, 60), "three": (40, 5)}
    for _ in range(3000):
        for name, (prompt, output) in shapes.items():
            while cell.live.accounts.of(name).waiting < 20:
                cell.submit(name, prompt, output)
        cell.turn()
    tokens = cell.tokens()
    assert abs(tokens["three"] / 3.0 - tokens["one"]) <= 2 * 12 * 60
    assert tokens["one"] > 8000


def test_idleness_saves_nothing_up() -> None:
    """A key that comes after a long time is served as one that has just begun: not alone until it has caught up."""
    cell = Saturated(KeyClass("busy"), KeyClass("late"), slots=4)
    for _ in range(500):
        while cell.live.accounts.of("busy").waiting < 5:
            cell.submit("busy", 5, 5)
        cell.turn()
    before = cell.tokens()
    assert before["late"] == 0
    for _ in range(500):
        for name in ("busy", "late"):
            while cell.live.accounts.of(name).waiting < 5:
                cell.submit(name, 5, 5)
        cell.turn()
    gained = {name: tokens - before[name] for name, tokens in cell.tokens().items()}
    assert abs(gained["busy"] - gained["late"]) <= 2 * 4 * 10


def test_within_a_key_priority_then_age_and_one_that_returns_gets_its_place_back() -> None:
    cell = Saturated(KeyClass("a"), slots=1)
    later, sooner, older = (cell.submit("a", 2, 3, priority=priority) for priority in (5, -5, 0))
    younger = cell.submit("a", 2, 3)
    order = []
    while (first := cell.live.waiting.first()) is not None:
        cell.live.start(first)
        order.append(first)
        if first is older and len(order) == 2:
            cell.live.stop(older)
            cell.live.waiting.push(older)
    assert order == [sooner, older, older, younger, later]


def test_names_that_are_not_configured_share_one_account() -> None:
    live = LiveSet([KeyClass("a")])
    assert live.accounts.of("") is live.accounts.of("made up") is live.accounts.of("made up, too")
    assert live.accounts.of("a") is not live.accounts.of("")
    assert [account.key.name for account in live.accounts] == ["", "a"]
