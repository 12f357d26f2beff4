"""What the decode loop asks of a draft. A draft can make decoding faster or slower; it cannot change the text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, log
from typing import Any, Generic, TypeVar, cast

import numpy as np

from warpsmith.backend.base import State, Want
from warpsmith.backend.block_draft import GrowingTree
from warpsmith.backend.rows import Rows
from warpsmith.backend.tree import MAX_NODES, Tree

Memory = TypeVar("Memory")

MODESTY = 0.5  # a draft may be right twice as often as it thinks


@dataclass(frozen=True)
class ScoredTree(Tree):
    """A tree that says how much it believes in itself, its nodes in the order in which they are worth verifying:
    the first n are the draft's best n, whatever n is."""

    scores: np.ndarray  # float64 [n]: the log of the probability of the path to each node; 0 for the root

    def first(self, nodes: int) -> ScoredTree:
        """The tree cut to the root and its best `nodes`."""
        end = nodes + 1
        return ScoredTree(self.tokens[:end], self.parents[:end], self.scores[:end])

    def conditionals(self) -> np.ndarray:
        """float64 [n]: how likely the draft thinks each node is, given that its parent is right."""
        above = np.where(self.parents < 0, 0.0, self.scores[self.parents])
        return np.exp(np.minimum(self.scores - above, 0.0))


@dataclass(frozen=True)
class Prices:
    """What a guess costs, so that a draft need not look for any that cannot pay."""

    token: float  # seconds of a token without a draft: what a right guess saves
    nodes: Sequence[float]  # by the nodes before it in the tree: how likely a node must be to be worth verifying

    @cached_property
    def least(self) -> list[float]:
        """The same as logarithms, for drafts that may be too modest."""
        return [log(MODESTY) + log(price) if price > 0 else -inf for price in self.nodes]


@dataclass(frozen=True)
class Others:
    """What else is in the same forward pass."""

    sequences: int = 0
    nodes: int = 0  # of all of them


ALONE = Others()


@dataclass(frozen=True)
class Context:
    """Where the loop stands when it asks for a draft."""

    ids: Sequence[int]  # the committed tokens, then the root: decided, but not yet run. Not to be kept or changed
    state: State  # of length len(ids) - 1
    depth: int  # at least 1: deeper nodes cannot be used any more and are cut off
    prices: Prices | None = None  # what guesses must pay for; None: all there is room for are wanted
    nodes: int = MAX_NODES  # a tree may have, the root among them; more are cut off
    others: Others = ALONE
    unseen: bool = False  # whether a tree may stay on the device until it is verified

    @property
    def root(self) -> int:
        return self.ids[-1]


class Proposer(ABC, Generic[Memory]):
    """Guesses what follows. A proposer holds what all sequences share: weights, settings, costs. What it knows of one
    sequence is its memory, which `new_memory` makes and the sequence keeps, so any number of sequences can draft.

    Per step the loop calls `propose`, then `observe` with what became of it, then `spent`. Each committed token is
    observed exactly once, in order, the prompt's included, with the rows that `wants` asks for, or with none if it was
    decoded while the proposer rested. When the past changes to another one the loop calls `restore` (or takes a new
    memory, for an empty past) and goes on observing from there; a proposer that cannot go back may forget instead, and
    only guesses worse.
    """

    name: str
    left_out: tuple[str, ...] = ()  # drafts that `auto` would have preferred, each with why it cannot be used
    wants: Want = Want(tokens="none")  # the layers' features and the hidden rows to observe; `tokens` is not used

    @property
    def off(self) -> str | None:
        """Why nothing is being guessed at present, in a few words; None while it is."""
        return None

    def tree_seconds(self) -> float:
        """Of the time of `propose` so far: what making trees of beliefs took."""
        return 0.0

    def new_memory(self) -> Memory:
        """What is known of a sequence that has not begun; None if nothing ever is."""
        return cast("Memory", None)

    def rest(self, memory: Memory) -> int:
        """How many tokens to decode plainly, in the backend's own fastest way, before asking for a guess again."""
        return 0

    @abstractmethod
    def propose(self, memory: Memory, context: Context) -> Tree | GrowingTree | None:
        """A tree whose node 0 is the root, or None to guess nothing this time."""

    def listens(self, memory: Memory) -> bool:
        """Whether it wants the rows of tokens that are decoded while it rests."""
        return False

    def spent(
        self, memory: Memory, tokens: int, seconds: float, forward_seconds: float | None, others: Others = ALONE
    ) -> None:
        """What was decided since it was last told, and how long that took, everything included but what other sequences
        in the same pass took for themselves.

        Of a step also the forward and the commit alone; None for tokens decoded while the proposer rested.
        """
        return None

    def observe(
        self,
        memory: Memory,
        tokens: Sequence[int],
        position: int,
        features: Rows | None,
        hidden: Rows | None,
    ) -> None:
        """`tokens` were committed at `position` onwards; a row of features and of hidden belongs to each token.

        Rows can be read until the backend computes again: of those that are to last, take `Rows.keep`."""
        return None

    def catch_up(self, memory: Memory, state: State) -> None:
        """A piece of a prompt was observed: the time to work through it, rather than when the first guess is due."""
        return None

    def snapshot(self, memory: Memory) -> Any:
        """What `restore` needs to come back to the present state of knowledge."""
        return None

    def restore(self, memory: Memory, saved: Any) -> None:
        """Go back to the time of `snapshot`."""
        return None


class Draft(Proposer[Memory]):
    """A proposer that knows how likely its guesses are, so that a budget can tell how many of them pay."""

    nodes: int = MAX_NODES - 1  # besides the root, at most
    keeps_up: bool = False  # rows of tokens that are decoded plainly cost it next to nothing

    @abstractmethod
    def propose(self, memory: Memory, context: Context) -> ScoredTree | GrowingTree | None: ...
