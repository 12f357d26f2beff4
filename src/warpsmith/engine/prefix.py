"""What earlier requests computed: snapshots by the tokens they hold, within a budget of bytes.

A recurrent state cannot be cut short, so a prompt goes on from the longest snapshot that it begins with. Snapshots lie
in a radix tree over token ids: texts that begin alike share the way to where they part. When the budget is full, the
snapshot that was used least recently goes first.

Texts stay exact: a snapshot is taken only where a prefill may be cut without changing a bit
(`Backend.prefill_multiple`), and at the end of an answer only by backends that may be cut anywhere. So a prompt that
goes on from a snapshot gives the same numbers as the prompt from its beginning.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from warpsmith.backend.base import Backend, Snapshot, State
from warpsmith.draft.base import Proposer
from warpsmith.engine.sequence import Sequence
from warpsmith.errors import DoesNotFit

TAIL = 16  # a prompt of unknown kind may end in a few tokens that the next one replaces; snapshots stay clear of them
LONG = 2048  # tokens: in a long prompt snapshots are taken after so many, twice as many, four times as many, ...
WORTH = 64  # tokens that two prompts must share for a snapshot where they part

Value = TypeVar("Value")


def common_prefix(a: abc.Sequence[int] | np.ndarray, b: abc.Sequence[int] | np.ndarray) -> int:
    """How many tokens two texts begin with in common."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:length], dtype=np.int64) != np.asarray(b[:length], dtype=np.int64))
    return int(differ[0]) if len(differ) else length


@dataclass(eq=False)
class _Node(Generic[Value]):
    edge: np.ndarray  # int32: the tokens from the parent to here, at least one but at the root
    parent: _Node[Value] | None = None
    children: dict[int, _Node[Value]] = field(default_factory=dict)  # by the first token of their edge
    value: Value | None = None
    nbytes: int = 0


class RadixTree(Generic[Value]):
    """A map from texts to values, asked for the longest text that a prompt begins with. The least recently used values
    go when all together have more than `budget` bytes."""

    def __init__(self, budget: int) -> None:
        self.budget, self.nbytes = budget, 0
        self._root: _Node[Value] = _Node(np.empty(0, np.int32))
        self._used: dict[_Node[Value], None] = {}  # nodes with values, least recently used first

    def __len__(self) -> int:
        return len(self._used)

    def find(self, prompt: abc.Sequence[int] | np.ndarray) -> tuple[Value | None, int]:
        """The value of the longest text that is followed by at least one more token of the prompt, and how many tokens
        the prompt has in common with any text."""
        best, shared = None, 0
        for node, depth, matched in self._walk(np.asarray(prompt, dtype=np.int32)):
            shared = depth
            if matched and node.value is not None and depth < len(prompt):
                best = node
        if best is None:
            return None, shared
        self._touch(best)
        return best.value, shared

    def has(self, text: abc.Sequence[int] | np.ndarray) -> bool:
        """Whether exactly this text has a value, which is used by asking."""
        tokens = np.asarray(text, dtype=np.int32)
        *_, (node, depth, matched) = self._walk(tokens)
        found = matched and depth == len(tokens) and node.value is not None
        if found:
            self._touch(node)
        return found

    def add(self, text: abc.Sequence[int] | np.ndarray, value: Value, nbytes: int) -> None:
        """What does not fit into the budget even alone is not kept."""
        tokens = np.asarray(text, dtype=np.int32)
        *_, (node, depth, matched) = self._walk(tokens)
        if not matched:
            node = self._split(node, len(node.edge) - (self._end(node) - depth))
        if depth < len(tokens):
            below: _Node[Value] = _Node(tokens[depth:].copy(), node)
            node.children[int(tokens[depth])] = below
            node = below
        self._drop_value(node)
        node.value, node.nbytes = value, nbytes
        self.nbytes += nbytes
        self._touch(node)
        self.make_room(0)

    def make_room(self, nbytes: int) -> None:
        """Let go of the least recently used until so many bytes more would fit."""
        while self._used and self.nbytes + nbytes > self.budget:
            node = next(iter(self._used))
            self._drop_value(node)
            self._prune(node)

    def _walk(self, tokens: np.ndarray) -> Iterator[tuple[_Node[Value], int, bool]]:
        """The nodes along a text, each with the tokens in common so far and whether that is all of its edge."""
        node, depth = self._root, 0
        yield node, depth, True
        while depth < len(tokens) and (child := node.children.get(int(tokens[depth]))) is not None:
            shared = common_prefix(child.edge, tokens[depth : depth + len(child.edge)])
            node, depth = child, depth + shared
            yield node, depth, shared == len(child.edge)
            if shared < len(child.edge):
                return

    def _end(self, node: _Node[Value]) -> int:
        """How many tokens lead to the end of a node's edge."""
        return len(node.edge) + (self._end(node.parent) if node.parent else 0)

    def _split(self, node: _Node[Value], at: int) -> _Node[Value]:
        """A node in the middle of an edge."""
        assert node.parent is not None
        above: _Node[Value] = _Node(node.edge[:at], node.parent, {int(node.edge[at]): node})
        node.parent.children[int(above.edge[0])] = above
        node.edge, node.parent = node.edge[at:], above
        return above

    def _touch(self, node: _Node[Value]) -> None:
        self._used.pop(node, None)
        self._used[node] = None

    def _drop_value(self, node: _Node[Value]) -> None:
        self._used.pop(node, None)
        self.nbytes -= node.nbytes
        node.value, node.nbytes = None, 0

    def _prune(self, node: _Node[Value]) -> None:
        """Take nodes away that lead to no value and part no texts."""
        while node.parent is not None and node.value is None and len(node.children) < 2:
            parent = node.parent
            if node.children:
                (child,) = node.children.values()
                child.edge, child.parent = np.concatenate([node.edge, child.edge]), parent
                parent.children[int(child.edge[0])] = child
                return
            del parent.children[int(node.edge[0])]
            node = parent


@dataclass(frozen=True)
class _Saved:
    state: Snapshot
    draft: Any


class PrefixCache:
    """The snapshots of all sequences on one backend and one proposer."""

    def __init__(self, backend: Backend, proposer: Proposer | None, empty: State, budget: int) -> None:
        self.backend, self.proposer = backend, proposer
        self._empty = backend.snapshot(empty)  # what a new text begins with
        self.saved: RadixTree[_Saved] = RadixTree(max(0, budget - self._empty.nbytes))

    @property
    def keeps_answers(self) -> bool:
        """Whether generated tokens leave the bits that prefilled ones would."""
        return self.backend.prefill_multiple == 1

    def begin(self, prompt: list[int], state: State, kept: int | None) -> tuple[Sequence, list[int]]:
        """A sequence that goes on from the longest past of the prompt that is known, in this state, and the lengths at
        which it should be saved.

        `kept` says how many tokens the prompt of the next turn will begin with; where nobody knows, all but a few.
        """
        found, shared = self.saved.find(prompt)
        snapshot = self._empty if found is None else found.state
        self.backend.restore(state, snapshot)
        draft = None if self.proposer is None else self.proposer.new_memory()
        if found is not None and self.proposer is not None:
            self.proposer.restore(draft, found.draft)
        start, end = snapshot.length, len(prompt)
        points = {end - TAIL if kept is None else min(kept, end - 1)}
        if shared - start >= WORTH:
            points.add(shared)  # where this prompt leaves another, as the next may too
        long = LONG
        while long < end:
            points.add(long)
            long *= 2
        multiple = self.backend.prefill_multiple
        return Sequence(prompt[:], state, draft), sorted({p - p % multiple for p in points if p - p % multiple > start})

    def save(self, sequence: Sequence) -> None:
        """Keep the sequence as far as it is committed, if there is room."""
        ids, length = sequence.committed, sequence.state.length
        needed = self.backend.snapshot_bytes(length)
        if not length or needed > self.saved.budget or self.saved.has(ids):
            return
        self.saved.make_room(needed)
        try:
            state = self.backend.snapshot(sequence.state)
        except DoesNotFit:
            return  # it only saves time later
        draft = None if self.proposer is None else self.proposer.snapshot(sequence.draft)
        self.saved.add(ids, _Saved(state, draft), state.nbytes + held_bytes(draft) + 4 * length)


def held_bytes(value: Any) -> int:
    """Bytes of the arrays in what a proposer saved."""
    if (nbytes := getattr(value, "nbytes", None)) is not None:
        return int(nbytes)
    if is_dataclass(value):
        return sum(held_bytes(getattr(value, each.name)) for each in fields(value))
    return sum(map(held_bytes, value)) if isinstance(value, list | tuple) else 0
