"""A draft whose acceptance is assumed: what a published acceptance length would be worth, on weights that are random.

The draft runs at its real cost. Its tree is then replaced by one of as many nodes, made of the text that plain decoding
wrote. How many of its levels are right is drawn anew each step, so that the mean is the length assumed: over a whole
text, whose last step decides no more tokens than are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from warpsmith.backend.base import State
from warpsmith.backend.block_draft import GrowingTree
from warpsmith.backend.rows import Rows
from warpsmith.draft.base import Context, Draft, ScoredTree
from warpsmith.errors import BadRequest

DEEPEST = 15  # levels of a tree: a block of 16 positions
GOLDEN = (5**0.5 - 1) / 2  # multiples of it, without their whole parts, fill [0, 1) evenly from the first few on


class Assumed(Draft[Any]):
    """Proposes a chain as deep as a block, and siblings of its first nodes. A step decides `length` tokens in the mean.

    Misses come one by one: each level is right with one probability, if the one above it was."""

    def __init__(self, draft: Draft, length: float, vocab: int, seed: int = 0) -> None:
        self.draft, self.vocab = draft, vocab
        self.name, self.wants, self.nodes, self.left_out = draft.name, draft.wants, draft.nodes, draft.left_out
        self._length, self._depth, self._chance = length, min(DEEPEST, draft.nodes), 0.0
        if not 1 <= length <= 1 + self._depth:
            raise BadRequest(
                f"A step over {self._depth} levels decides 1 to {1 + self._depth} tokens, not {length:g}.",
                "Assume another length, or use a larger budget.",
            )
        self._random = float(np.random.default_rng(seed).random())
        self._prompt, self._answer = 0, list[int]()

    def expect(self, prompt: int, answer: Sequence[int]) -> None:
        """What plain decoding wrote after so many tokens."""
        self._prompt, self._answer = prompt, list(answer)
        self._chance = chance_of(self._length, self._depth, len(answer) - 1)  # the prompt decides the first

    def propose(self, memory: Any, context: Context) -> ScoredTree | GrowingTree:
        growing = self.draft.propose(memory, context)
        ahead = self._answer[len(context.ids) - self._prompt :][: self._depth]
        self._random = (self._random + GOLDEN) % 1.0
        right = 0
        while right < len(ahead) and self._random < self._chance ** (right + 1):
            right += 1
        ahead += [0] * (self._depth - len(ahead))  # the text ends
        levels = np.arange(self.nodes) % self._depth
        others = 1 + np.arange(self.nodes) // self._depth  # as many tokens further than the right one
        others[:right] = 0
        tokens = (np.array(ahead)[levels] + others) % self.vocab
        tree = ScoredTree(
            np.array([context.root, *tokens.tolist()]), np.array([-1, *levels.tolist()]), np.zeros(1 + self.nodes)
        )
        if not isinstance(growing, GrowingTree):
            return tree
        growing.instead(tree.trimmed(context.depth, growing.nodes))
        return growing

    def tree_seconds(self) -> float:
        return self.draft.tree_seconds()

    def new_memory(self) -> Any:
        return self.draft.new_memory()

    def observe(
        self, memory: Any, tokens: Sequence[int], position: int, features: Rows | None, hidden: Rows | None
    ) -> None:
        self.draft.observe(memory, tokens, position, features, hidden)

    def catch_up(self, memory: Any, state: State) -> None:
        self.draft.catch_up(memory, state)

    def snapshot(self, memory: Any) -> Any:
        return self.draft.snapshot(memory)

    def restore(self, memory: Any, saved: Any) -> None:
        self.draft.restore(memory, saved)


@cache
def chance_of(length: float, depth: int, tokens: int) -> float:
    """How often a level must be right for a step to decide `length` tokens in the mean, over a text of so many."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_steps(middle, depth, tokens) * length > tokens else (low, middle)
    return high


def mean_steps(chance: float, depth: int, tokens: int) -> float:
    """How many steps over chains of `depth` decide so many tokens, in the mean."""
    right = chance ** np.arange(depth + 1)  # so many levels or more
    right[:-1] *= 1 - chance  # exactly so many
    most_first = right[::-1]
    few = min(tokens, 20 * (depth + 1))  # of a longer text each token more takes the same
    steps = [0.0] * (depth + 1)  # with no token left, or fewer than none; then with one, with two, ...
    for _ in range(few):
        steps.append(1 + float(most_first @ steps[-1 - depth :]))
    return steps[-1] + (tokens - few) / float(right @ np.arange(1, depth + 2))
