"""N-gram lookup: what followed the last time the text looked like this. No weights; good at edits and quotes.

The index grows by one entry a token and can be cut back, so a step costs the same at any length of text; it grows when
it is looked at, so a text for which nobody guesses costs nothing. Each token closes one n-gram of each length in
`KEYS`; an n-gram remembers where it was last closed, and each place the one before it. The places found are then
compared backwards with the text, so that the longest match counts most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log
from typing import Any

import numpy as np

from warpsmith.backend.rows import Rows
from warpsmith.backend.tree import MAX_NODES
from warpsmith.draft.base import Context, Draft, Prices, ScoredTree
from warpsmith.draft.ddtree import worth_verifying

KEYS = (6, 3, 2)  # lengths of n-grams that are looked up, the longest first
PLACES = 8  # earlier places that may speak at a time
LOOKED_AT = 32  # places compared for each length
LONGEST = 32  # tokens compared backwards
DOUBT = 6.0  # how much weight is kept for something new; a match of n tokens has weight n^2


class NGramMemory:
    """The text, and where each n-gram stood in it."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._last: list[dict[tuple[int, ...], int]] = [{} for _ in KEYS]  # n-gram -> the last place it ended at
        self._before: list[list[int]] = [[] for _ in KEYS]  # place -> the place before with the same n-gram, or -1

    def become(self, tokens: Sequence[int]) -> None:
        """Make it that of another text; cheap if much of the beginning is the same."""
        length = min(len(self.tokens), len(tokens))
        differ = np.flatnonzero(np.array(self.tokens[:length]) != np.array(tokens[:length]))
        shared = int(differ[0]) if len(differ) else length
        del self.tokens[max(shared, self._indexed) :]
        while len(self.tokens) > shared:
            self._drop()
        self.tokens += tokens[shared:]

    @property
    def _indexed(self) -> int:
        """Tokens that are in the index."""
        return len(self._before[0])

    def _index(self) -> None:
        """The tokens that are not yet in the index."""
        tokens, begin = self.tokens, self._indexed
        for key, last, before in zip(KEYS, self._last, self._before, strict=True):
            for place in range(begin, len(tokens)):
                gram = tuple(tokens[max(0, place + 1 - key) : place + 1])
                before.append(last.get(gram, -1) if len(gram) == key else -1)
                if len(gram) == key:
                    last[gram] = place

    def _drop(self) -> None:
        for key, last, before in zip(KEYS, self._last, self._before, strict=True):
            gram, earlier = tuple(self.tokens[-key:]), before.pop()
            if earlier >= 0:
                last[gram] = earlier
            else:
                last.pop(gram, None)
        self.tokens.pop()

    def places(self, text: list[int]) -> Iterator[tuple[int, int]]:
        """Where the end of `text` stood before and how many tokens agreed; the latest places of the longest n-gram."""
        self._index()
        for key, last, before in zip(KEYS, self._last, self._before, strict=True):
            place = last.get(tuple(text[-key:]), -1) if len(text) >= key else -1
            found: list[tuple[int, int]] = []
            while place >= 0 and len(found) < LOOKED_AT:
                found.append((place, self._agreement(text, place, key)))
                place = before[place]
            if found:
                found.sort(key=lambda each: -each[1])  # stable: of equals the latest
                yield from found[:PLACES]
                return

    def continuation(self, place: int, root: int, length: int) -> list[int]:
        """What followed `place`; where that runs into the present, the text goes round in circles."""
        following = [*self.tokens[place + 1 : place + 1 + length], root][:length]
        circle = len(self.tokens) - place
        while len(following) < length:
            following.append(following[-circle])
        return following

    def _agreement(self, text: list[int], place: int, known: int) -> int:
        count, longest = known, min(len(text), place + 1)
        while count < longest and self.tokens[place - count] == text[-1 - count]:
            count += 1
        return count


class NGram(Draft[NGramMemory]):
    """Continues the text as it went on where its last few tokens stood before."""

    name = "ngram"

    def __init__(self, nodes: int = MAX_NODES - 1) -> None:
        self.nodes = nodes

    def new_memory(self) -> NGramMemory:
        return NGramMemory()

    def observe(
        self,
        memory: NGramMemory,
        tokens: Sequence[int],
        position: int,
        features: Rows | None,
        hidden: Rows | None,
    ) -> None:
        if position != len(memory.tokens):
            memory.become([])
        memory.tokens += tokens

    def snapshot(self, memory: NGramMemory) -> Any:
        return np.array(memory.tokens, dtype=np.int32)

    def restore(self, memory: NGramMemory, saved: Any) -> None:
        memory.become(saved.tolist())

    def propose(self, memory: NGramMemory, context: Context) -> ScoredTree | None:
        text = [*memory.tokens[1 - LONGEST :], context.root]
        depth = min(context.depth, self.nodes)
        trie = _Trie(context.root)
        for rank, (place, matched) in enumerate(memory.places(text)):
            length = -(-depth // (rank + 1))  # second thoughts are rarely right for long
            trie.add(memory.continuation(place, context.root, length), matched)
        if len(trie.tokens) == 1:
            return None
        return trie.tree(self.nodes, context.prices)


class _Trie:
    """Continuations that share their beginnings, each with the weight of the places that speak for it."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents = [root], [-1]
        self._children: dict[tuple[int, int], int] = {}
        self._arriving, self._leaving = [0.0], [0.0]  # weight that reaches a node, and that goes on from it

    def add(self, continuation: list[int], matched: int) -> None:
        node = 0
        for step, token in enumerate(continuation):
            weight = float(matched + step) ** 2  # if all of it holds so far, so many tokens agree
            self._leaving[node] += weight
            child = self._children.setdefault((node, token), len(self.tokens))
            if child == len(self.tokens):
                self.tokens.append(token)
                self.parents.append(node)
                self._arriving.append(0.0)
                self._leaving.append(0.0)
            self._arriving[child] += weight
            node = child

    def tree(self, nodes: int, prices: Prices | None) -> ScoredTree:
        """The likeliest nodes: each child has its share of the weight, and doubt has one too."""
        scores = [0.0]
        for node, parent in enumerate(self.parents[1:], start=1):
            scores.append(scores[parent] + log(self._arriving[node] / (self._leaving[parent] + DOUBT)))
        # sorting keeps the order of equals, so no parent comes after its child
        kept = sorted(range(len(scores)), key=lambda node: -scores[node])[: nodes + 1]
        while len(kept) > 2 and not worth_verifying(prices, len(kept) - 1, scores[kept[-1]]):
            kept.pop()
        index = {-1: -1} | {node: place for place, node in enumerate(kept)}
        return ScoredTree(
            np.array([self.tokens[node] for node in kept]),
            np.array([index[self.parents[node]] for node in kept]),
            np.array([scores[node] for node in kept]),
        )
