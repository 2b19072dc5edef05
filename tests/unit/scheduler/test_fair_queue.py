"""Who is admitted next, against a list of everybody that is searched from end to end."""

from __future__ import annotations

from scheduler.key_class import KeyClass
from scheduler.messages import SequenceRequest
from scheduler.state import workers
from scheduler.state.live_set import LiveSet


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
