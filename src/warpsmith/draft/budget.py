"""How many drafted nodes pay, and whether any do.

A step over n nodes takes the draft's time and that of a forward over n + 1 nodes, and is expected to decide one token
more for every node, times the probability that it is right. The best n has the most expected tokens a second. The
draft's probabilities are corrected by what became of earlier ones.

Whether it was worth it is kept in an account, in tokens that plain decoding would have made in the time: a step that
decides four tokens in the time of two earns two. While the account is empty nothing is drafted, and it fills up again
by a hundredth of each plain token. So what speculation can cost is bounded: a hundredth, and the small sum that every
account starts with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from warpsmith.backend.base import State
from warpsmith.draft.base import Context, Draft, Proposer, ScoredTree
from warpsmith.draft.costs import Costs

BINS = 10
PRIOR = 4.0  # how many observations the draft's own word is worth
MEMORY = 256.0  # observations after which the older half counts half
START, MOST, LEAST_TO_RETRY = 8.0, 16.0, 2.0  # the account, in plain tokens
REFILL = 0.01  # a plain token
LEAST_PLAIN = 3  # plain steps before the first draft, so that there is something to compare it with
RECENT = 9  # timings of which the median is taken: a step that was held up does not count


def best_size(probabilities: Sequence[float], seconds: Sequence[float], draft_seconds: float) -> int:
    """How many of a draft's nodes to verify for the most expected tokens a second.

    `probabilities` are those of the nodes below the root, in the order in which they would be taken; `seconds` are
    those of a forward over 1, 2, ... nodes. Of equal rates the smaller tree.
    """
    best, best_rate, tokens = 0, 1 / (draft_seconds + seconds[0]), 1.0
    for nodes, probability in enumerate(probabilities, start=1):
        tokens += probability
        rate = tokens / (draft_seconds + seconds[nodes])
        if rate > best_rate:
            best, best_rate = nodes, rate
    return best


class Calibration:
    """How often guesses of a given confidence were right."""

    def __init__(self) -> None:
        self._tried, self._right = np.zeros(BINS), np.zeros(BINS)

    def corrected(self, confidence: np.ndarray) -> np.ndarray:
        bins = _bin(confidence)
        return (self._right[bins] + PRIOR * confidence) / (self._tried[bins] + PRIOR)

    def learn(self, confidence: np.ndarray, right: np.ndarray) -> None:
        bins = _bin(confidence)
        np.add.at(self._tried, bins, 1.0)
        np.add.at(self._right, bins, right.astype(np.float64))
        full = self._tried > MEMORY
        self._tried[full] /= 2
        self._right[full] /= 2


def _bin(confidence: np.ndarray) -> np.ndarray:
    return np.minimum((confidence * BINS).astype(np.int64), BINS - 1)


def path_probabilities(tree: ScoredTree, calibration: Calibration) -> np.ndarray:
    """float64 [n]: the corrected probability of the path to each node; 1 for the root."""
    conditionals = calibration.corrected(tree.conditionals())
    paths = np.ones(len(tree))
    for node, parent in enumerate(tree.parents[1:].tolist(), start=1):
        paths[node] = paths[parent] * conditionals[node]
    return paths


class Account:
    """What speculation has earned and lost, in tokens of plain decoding."""

    def __init__(self) -> None:
        self.credit, self.open = START, True
        self._needed = LEAST_TO_RETRY  # to open again

    def drafted(self, tokens: int, worth: float) -> None:
        """A step decided `tokens` in a time that plain decoding would have made `worth` tokens in."""
        self.credit = min(self.credit + tokens - worth, MOST)
        if self.credit < 0:
            self.open = False
            # enough for a step or two that are all wrong
            self._needed = min(max(LEAST_TO_RETRY, 2 * (worth - 1)), MOST)

    def plain(self) -> None:
        """A token was decided plainly."""
        self.credit = min(self.credit + REFILL, MOST)
        self.open = self.open or self.credit >= self._needed

    @property
    def waits(self) -> int:
        """Plain tokens until it opens again."""
        return 0 if self.open else round((self._needed - self.credit) / REFILL)


class Pace:
    """Costs as they are at present: at this length of text, with this sampler, on a machine as busy as it is.

    A plain step tells how fast the machine is, and a tree how much more than its share it takes, by rough size.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._plain: deque[float] = deque(maxlen=RECENT)
        self._extra: dict[int, deque[float]] = {}  # by the bits of the number of nodes

    @property
    def known(self) -> bool:
        """Whether it has seen enough plain steps to compare others with."""
        return len(self._plain) >= LEAST_PLAIN

    def forget_trees(self) -> None:
        """What they took was compared with plain steps of a time that may be over."""
        self._extra.clear()

    def took(self, nodes: int, seconds: float) -> None:
        ratio = seconds / self.costs.seconds[nodes - 1]
        if nodes == 1:
            self._plain.append(ratio)
        else:
            self._extra.setdefault(_bits(nodes), deque(maxlen=RECENT)).append(ratio / self._speed())

    def plain(self) -> float:
        """Seconds of a token without a draft."""
        return self.costs.seconds[0] * self._speed()

    def seconds(self) -> list[float]:
        """Of a forward over 1, 2, ... nodes."""
        known = {bits: median(ratios) for bits, ratios in self._extra.items()}
        elsewhere, speed = median(known.values()) if known else 1.0, self._speed()
        trees = (s * speed * known.get(_bits(n), elsewhere) for n, s in enumerate(self.costs.seconds[1:], start=2))
        return [self.plain(), *trees]

    def _speed(self) -> float:
        return median(self._plain) if self._plain else 1.0


def _bits(nodes: int) -> int:
    return (nodes - 1).bit_length()


@dataclass
class _Step:
    position: int
    tree: ScoredTree | None
    draft_seconds: float
    since: float  # the forward began


class Budgeted(Proposer):
    """A draft held to what pays here."""

    def __init__(self, draft: Draft, costs: Costs, clock: Callable[[], float] = perf_counter) -> None:
        self.draft, self.costs, self.clock = draft, costs, clock
        self.name, self.wants = draft.name, draft.wants
        self.calibration, self.account = Calibration(), Account()
        self._draft_seconds: deque[float] = deque(maxlen=RECENT)
        self._pace = Pace(costs)
        self._step: _Step | None = None

    @property
    def off(self) -> str | None:
        if self.account.open:
            return None
        return f"{self.name} drafts do not pay here; next try after {self.account.waits} tokens"

    def propose(self, context: Context) -> ScoredTree | None:
        before = self.clock()
        tree = self.draft.propose(context) if self.account.open and self._pace.known else None
        now = self.clock()
        took = now - before
        if tree is not None:
            self._draft_seconds.append(took)
            tree = tree.first(self._size(tree))
        self._step = _Step(len(context.ids) - 1, tree, took, now)
        return tree

    def _size(self, tree: ScoredTree) -> int:
        probabilities = path_probabilities(tree, self.calibration)[1:].tolist()
        return best_size(probabilities, self._pace.seconds(), median(self._draft_seconds))

    def observe(
        self, tokens: Sequence[int], position: int, features: np.ndarray | None, hidden: np.ndarray | None
    ) -> None:
        self.draft.observe(tokens, position, features, hidden)
        step, self._step = self._step, None
        if step is not None and step.position == position:
            self._learn(step, tokens, self.clock() - step.since)

    def _learn(self, step: _Step, tokens: Sequence[int], seconds: float) -> None:
        tree = step.tree
        self._pace.took(1 if tree is None else len(tree), seconds)
        plain = self._pace.plain()
        if tree is not None:
            # what such a step takes, not what this one took: a hiccup of the machine says nothing about the draft
            took = median(self._draft_seconds) + self._pace.seconds()[len(tree) - 1]
            self.account.drafted(len(tokens), took / plain)
            if not self.account.open:
                self._pace.forget_trees()
            path = _followed(tree, tokens)
            tried = np.isin(tree.parents, path)
            right = np.isin(np.arange(len(tree)), path)
            self.calibration.learn(tree.conditionals()[tried], right[tried])
        elif self.account.open:
            self.account.drafted(1, 1 + step.draft_seconds / plain)
        else:
            self.account.plain()

    # -- the draft's own business -------------------------------------------------------------------------------------

    def catch_up(self, state: State) -> None:
        if self.account.open:
            self.draft.catch_up(state)

    def reset(self) -> None:
        self._step = None
        self.draft.reset()

    def snapshot(self) -> Any:
        return self.draft.snapshot()

    def restore(self, saved: Any) -> None:
        self._step = None
        self.draft.restore(saved)


def _followed(tree: ScoredTree, tokens: Sequence[int]) -> list[int]:
    """The nodes that were committed as `tokens`."""
    path = [0]
    for token in tokens[1:]:
        path.append(tree.children(path[-1])[token])
    return path
