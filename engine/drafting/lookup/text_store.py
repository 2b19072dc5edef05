"""Prompt lookup across sequences: what followed the same tokens in earlier texts of a cache scope. Knows no torch.

A text is a prompt with its output. The texts of a scope are one tree: sequences that begin alike share the nodes of
what they have in common, so a text that comes again takes no more memory. A tree is a ring of nodes and hash tables
without chains, of the same fixed size for each scope: nothing that one scope does changes what another finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

ENDING = 8
"""Tokens by which a continuation is found in texts that begin otherwise."""
LONGEST_ENDING = 32
"""As far as an ending is compared."""
TOKEN_BYTES = 22
"""What a token of a text takes: its own 4, those of two links, and 10 in tables."""
MOST_SCOPES = 16
REST_STEPS = 1000
"""A scope that was not used for so many steps gives way to another."""

_LINK = 4
_AT_ONCE = 4096
"""Tokens that enter in one step, some milliseconds; those that sequences with more to enter share."""
_SOME = 64
"""Tokens of each sequence that enter in any case."""

_ROOT = 0
_trees = count(1)


@dataclass(slots=True, eq=False)
class TextPlace:
    """Where a sequence stands in the `tree` of its scope: at the `node` of the last of its first `length` tokens."""

    tree: int = 0
    node: int = _ROOT
    length: int = 0

    def truncate(self, length: int) -> None:
        """The sequence changes from `length` on: it is followed from its beginning again."""
        if length < self.length:
            self.tree = 0


class TextTree:
    """The texts of one scope.

    Nodes have consecutive numbers below `numbers`, which then start again. Node n lies in slot n % `size`; slot 0 is
    the root's. Each new node overwrites the oldest one. One in the older half of the ring that is entered again is
    written anew, with what follows it: so what was used least recently is overwritten first.
    """

    def __init__(self, size: int, numbers: int = 1 << 32) -> None:
        self.number = next(_trees)
        self.used = 0
        self._size, self._turn = size, numbers // size * size
        self._next = 1
        self._tokens, self._parents, self._latest = _zeros(size), _zeros(size), _zeros(size)
        self._ended = _zeros(2 * size)
        """By the hash of an ending, the latest node with which it ended and a text went on."""
        self._others = _zeros(size // 2)
        """By the hash of a node and a token, a child that is not the node's latest."""

    def lag(self, place: TextPlace, history: Sequence[int]) -> int:
        """How many tokens of a sequence are to be entered: all, where its place is in another tree, or getting old."""
        if place.tree != self.number or not self._alive(place.node, self._size // 2):
            place.tree, place.node, place.length = self.number, _ROOT, 0
        return len(history) - place.length

    def follow(self, place: TextPlace, history: Sequence[int], most: int) -> None:
        """Enters the next tokens of a sequence, at most so many."""
        size, ended, latest, tokens = self._size, self._ended, self._latest, self._tokens
        slots, most = len(ended), min(most, self.lag(place, history))
        node, end = place.node, place.length + most
        for at in range(place.length, end):
            token = history[at]
            if at >= ENDING:
                ended[hash(tuple(history[at - ENDING : at])) % slots] = node
            before = latest[node % size]
            child = self._child(node, token)
            if not self._alive(child, size // 2):
                child = self._write(node, token, child)
            if child != before:
                if tokens[before % size] != token and self._alive(before, size):
                    self._others[hash((node, tokens[before % size])) % len(self._others)] = before
                latest[node % size] = child
            node = child
        place.node, place.length = node, end

    def continuation(
        self, place: TextPlace, history: Sequence[int], sampled: int, most: int, shortest: int
    ) -> tuple[list[int], int]:
        """Up to `most` tokens that followed what a sequence ends with, the `sampled` token behind its history, and how
        many tokens of the two are alike: all, where a text began with them; else some of the last ones, at least
        `shortest`. Nothing where there are none."""
        length = len(history) + 1
        if place.tree == self.number and place.length == len(history) and length >= shortest:
            child = self._child(place.node, sampled) if self._alive(place.node, self._size) else _ROOT
            if child and (found := self._after(child, most)):
                return found, length
        shortest = max(shortest, ENDING)
        if length >= shortest:
            ending = (*history[1 - LONGEST_ENDING :], sampled)
            node = self._ended[hash(ending[-ENDING:]) % len(self._ended)]
            alike = self._alike(node, ending)
            if alike >= shortest and (found := self._after(node, most)):
                return found, alike
        return [], 0

    def _alive(self, node: int, newest: int) -> bool:
        """Whether a node is among so many `newest` ones; the root is not."""
        return node != _ROOT and (self._next - node) % self._turn <= newest

    def _child(self, node: int, token: int) -> int:
        """The node of the token after this one; the root where there is none."""
        size, tokens = self._size, self._tokens
        child = self._latest[node % size]
        if tokens[child % size] == token and self._alive(child, size):
            return child
        child = self._others[hash((node, token)) % len(self._others)]
        known = tokens[child % size] == token and self._parents[child % size] == node
        return child if known and self._alive(child, size) else _ROOT

    def _write(self, parent: int, token: int, old: int) -> int:
        """A new node, in the place of the oldest one. It takes over what follows `old`, its older self, if any."""
        size, node = self._size, self._next
        slot, below = node % size, self._latest[old % size] if old else _ROOT
        self._tokens[slot], self._parents[slot], self._latest[slot] = token, parent, _ROOT
        if below and (node - below) % self._turn < size:
            self._latest[slot], self._parents[below % size] = below, node
        self._next = (node + 1) % self._turn
        if not self._next % size:
            self._next += 1
        return node

    def _alike(self, node: int, ending: Sequence[int]) -> int:
        """How many of the last tokens of `ending` are those that end with a node."""
        size, alike = self._size, 0
        for token in reversed(ending):
            if not self._alive(node, size) or self._tokens[node % size] != token:
                break
            node = self._parents[node % size]
            alike += 1
        return alike

    def _after(self, node: int, most: int) -> list[int]:
        """What followed a node, the latest first."""
        size, found = self._size, list[int]()
        while len(found) < most:
            node = self._latest[node % size]
            if not self._alive(node, size):
                break
            found.append(self._tokens[node % size])
        return found


class TextStore:
    """The trees of at most `MOST_SCOPES` scopes, which take `memory` bytes together at most.

    Each has the same part of them, whatever the others do. Where there is no place for a scope, it takes that of the
    one that was used least recently, if that has rested; otherwise nothing of it is kept.
    """

    def __init__(self, memory: int) -> None:
        self._size = memory // MOST_SCOPES // TOKEN_BYTES
        self._trees: dict[bytes, TextTree] = {}
        self._steps = 0

    def enter(self, texts: Sequence[tuple[bytes, TextPlace, Sequence[int]]]) -> None:
        """What sequences have committed by the end of a step: the scope, the place and the history of each."""
        self._steps += 1
        found = [(self.tree(scope), place, history) for scope, place, history in texts]
        entering = [(tree, place, history) for tree, place, history in found if tree is not None]
        lagging = sum(tree.lag(place, history) > _SOME for tree, place, history in entering)
        most = max(_SOME, _AT_ONCE // max(lagging, 1))
        for tree, place, history in entering:
            tree.follow(place, history, most)

    def tree(self, scope: bytes) -> TextTree | None:
        """None where there is no place."""
        tree = self._trees.get(scope)
        if tree is None:
            if len(self._trees) == MOST_SCOPES:
                oldest = min(self._trees, key=lambda one: self._trees[one].used)
                if self._steps - self._trees[oldest].used < REST_STEPS:
                    return None
                del self._trees[oldest]
            tree = self._trees[scope] = TextTree(self._size)
        tree.used = self._steps
        return tree


def _zeros(count: int) -> memoryview[int]:
    """Of 32 bits each. Memory that was never written to takes no pages of the machine."""
    return memoryview(bytearray(_LINK * count)).cast("I")
