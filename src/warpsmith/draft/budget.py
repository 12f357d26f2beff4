"""How many drafted nodes pay, and whether any do.

A step over n nodes takes the draft's time, that of a forward over n + 1 nodes, and that of the host around them. It is
expected to decide one token more for every node, times the probability that it is right. The best n has the most
expected tokens a second. The draft's probabilities are corrected by what became of earlier ones.

Whether it was worth it is kept in an account, in tokens that plain decoding would have made in the time: a step that
decides four tokens in the time of two earns two. When the account is empty the draft rests, and the backend decodes by
itself; each of these tokens pays a little into the account, until there is enough for another try. Another text is
another chance, a smaller one each time that nothing comes of it. So what speculation can cost is bounded: half a
hundredth, and the small sums that an account is given.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median
from typing import Any

import numpy as np

from warpsmith.backend.base import State
from warpsmith.backend.rows import Rows
from warpsmith.backend.tree import MAX_NODES
from warpsmith.draft.base import Context, Draft, Prices, Proposer, ScoredTree
from warpsmith.draft.costs import Costs

BINS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99)  # confidences that part kinds of guesses
PRIOR = 4.0  # how many observations the draft's own word is worth
MEMORY = 256.0  # observations after which the older half counts half
START, MOST = 4.0, 16.0  # the account, in plain tokens
CHANCE = 2.0  # what another text is worth to a draft that rests: less than a hundredth of a short answer
REFILL = 0.005  # a plain token
STAKE = 2.0  # tokens that a forward may lose however little the account holds; beyond that it may lose what is there
LISTENS = 12  # tokens before another try of which a draft that needs their rows is told
RECENT = 9  # timings of which the median is taken: a step that was held up does not count
CHECK = 8  # tokens decoded plainly now and then, to see how fast that is at present
CHECK_FIRST, CHECK_LAST = 32, 512  # drafted tokens after which that is done: soon at first, then more and more rarely
FURTHER, BEYOND = 2, 2  # how deep it is asked: so many times as deep as it was right lately, and so many levels more
SILENCE = 15  # tokens, at most, for which a draft is not asked that had nothing to say


def best_size(probabilities: Sequence[float], seconds: Sequence[float], other_seconds: float) -> tuple[int, float]:
    """How many of a draft's nodes to verify for the most expected tokens a second, and how many those are.

    `probabilities` are those of the nodes below the root, in the order in which they would be taken; `seconds` are
    those of a forward over 1, 2, ... nodes, `other_seconds` what a step takes besides. Of equal rates the smaller tree.
    """
    best, best_rate, tokens = 0, 1 / (other_seconds + seconds[0]), 1.0
    for nodes, probability in enumerate(probabilities, start=1):
        tokens += probability
        rate = tokens / (other_seconds + seconds[nodes])
        if rate > best_rate:
            best, best_rate = nodes, rate
    return best, best_rate


def least_probabilities(costs: Costs) -> list[float]:
    """How likely a node must be to pay, by the nodes before it (the root among them): its share of the cheapest way on.

    What pays has to bring more tokens a second than plain decoding does.
    """
    seconds = np.array(costs.seconds)
    return [float(((seconds[n:] - seconds[n - 1]) / np.arange(1, len(seconds) - n + 1)).min() / costs.plain)
            for n in range(1, len(seconds))]  # fmt: skip


class Calibration:
    """How often guesses of a given confidence were right."""

    def __init__(self) -> None:
        self._tried, self._right = [0.0] * (len(BINS) + 1), [0.0] * (len(BINS) + 1)

    def corrected(self, confidence: float) -> float:
        bin = bisect(BINS, confidence)
        return (self._right[bin] + PRIOR * confidence) / (self._tried[bin] + PRIOR)

    def learn(self, confidence: float, right: bool) -> None:
        bin = bisect(BINS, confidence)
        self._tried[bin] += 1.0
        self._right[bin] += right
        if self._tried[bin] > MEMORY:
            self._tried[bin] /= 2
            self._right[bin] /= 2


def path_probabilities(tree: ScoredTree, calibration: Calibration) -> list[float]:
    """The corrected probability of the path to each node; 1 for the root."""
    paths = [1.0]
    for parent, conditional in zip(tree.parents[1:].tolist(), tree.conditionals()[1:].tolist(), strict=True):
        paths.append(paths[parent] * calibration.corrected(conditional))
    return paths


class Account:
    """What speculation has earned and lost, in tokens of plain decoding."""

    def __init__(self) -> None:
        self.credit, self.open = START, True
        self._needed = 0.0  # to open again
        self._grant = 0.0  # what another text is worth
        self._failures = 0  # times in a row that it ran empty without having earned anything
        self._earned = False  # since it last opened

    def drafted(self, tokens: int, worth: float, next_worth: float) -> None:
        """A step decided `tokens` in a time that plain decoding would have made `worth` tokens in.

        An empty account closes, until there is enough for two steps that are all wrong and take `next_worth` each.
        """
        self.credit = min(self.credit + tokens - worth, MOST)
        self._earned = self._earned or self.credit > max(START, self._needed)
        if self.credit < 0:
            self.open = False
            self._failures = 0 if self._earned else self._failures + 1
            self._earned = False
            self._grant = CHANCE * 0.5**self._failures
            self._needed = min(2 * max(next_worth - 1, 0.0), MOST)

    def plain(self, tokens: int) -> None:
        """Tokens were decoded plainly while it was closed."""
        self.credit = min(self.credit + tokens * REFILL, MOST)
        self.open = self.credit >= self._needed

    def new_text(self) -> None:
        """What failed on the last one may do well on this."""
        if not self.open:
            self.credit, self._grant = min(self.credit + self._grant, MOST), 0.0
            self.open = self.credit >= self._needed

    @property
    def waits(self) -> int:
        """Plain tokens until it opens again."""
        return 0 if self.open else max(1, round((self._needed - self.credit) / REFILL))


class Pace:
    """Costs as they are at present: at this length of text, with this sampler, on a machine as busy as it is.

    What a plain token would take is told from what forwards take at the same moment, so that a machine that gets slower
    is not held against a draft: each time tokens were decoded plainly, they are compared with the step after them.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._forward: deque[float] = deque(maxlen=RECENT)  # how much longer than measured forwards take
        self._extra: dict[int, deque[float]] = {}  # likewise against that, by the bits of the number of nodes
        self._other: deque[float] = deque(maxlen=RECENT)  # seconds of a step besides its forward
        self._decoded: float | None = None  # seconds of a plain token just before
        self._plain: dict[int, deque[float]] = {}  # how much longer than forwards plain tokens take, by the same bits
        self._seconds: list[float] | None = None

    def decoded(self, tokens: int, seconds: float) -> None:
        """Tokens were decoded plainly."""
        self._decoded = seconds / tokens

    def stepped(self, nodes: int, seconds: float, forward_seconds: float) -> float:
        """A step was made. Returns how many tokens plain decoding would have made in the time."""
        slower, bits = forward_seconds / self.costs.seconds[nodes - 1], _bits(nodes)
        self._forward.append(slower)
        self._extra.setdefault(bits, deque(maxlen=RECENT)).append(slower / self._speed())
        self._seconds = None
        if self._decoded is not None:
            ratio = self._decoded / (self.costs.plain * slower)
            self._plain.setdefault(bits, deque(maxlen=RECENT)).append(ratio)
            self._decoded = None
        other = self.calm(seconds - forward_seconds)
        self._other.append(other)
        return (forward_seconds + other) / (self.costs.plain * slower * self._plainness(bits))

    def calm(self, other: float) -> float:
        """Seconds of a step besides its forward without the machine's hiccups, or what it takes to begin at all."""
        return min(other, 3 * self.other() if self._other else self.plain())

    def plain(self) -> float:
        """Seconds of a token without a draft."""
        return self.costs.plain * self._speed() * self._plainness(None)

    def other(self) -> float:
        """Seconds of a step besides its forward and commit."""
        return median(self._other) if self._other else 0.0

    def seconds(self) -> list[float]:
        """Of a forward over 1, 2, ... nodes."""
        if self._seconds is None:
            known = {bits: median(ratios) for bits, ratios in self._extra.items()}
            elsewhere = median(known.values()) if known else 1.0
            factors = [self._speed() * known.get(bits, elsewhere) for bits in range(_bits(len(self.costs.seconds)) + 1)]
            self._seconds = [s * factors[_bits(n)] for n, s in enumerate(self.costs.seconds, start=1)]
        return self._seconds

    def _speed(self) -> float:
        return median(self._forward) if self._forward else 1.0

    def _plainness(self, bits: int | None) -> float:
        if bits in self._plain:
            return median(self._plain[bits])
        return median(chain.from_iterable(self._plain.values())) if self._plain else 1.0


def _bits(nodes: int) -> int:
    return (nodes - 1).bit_length()


@dataclass
class _Step:
    position: int
    tree: ScoredTree | None  # what was left of the draft's


class Budgeted(Proposer):
    """A draft held to what pays here."""

    def __init__(self, draft: Draft, costs: Costs) -> None:
        self.draft, self.costs = draft, costs
        self.name, self.wants = draft.name, draft.wants
        self.calibration, self.account = Calibration(), Account()
        self._least = least_probabilities(costs)
        self._listens = LISTENS if draft.wants.features or draft.wants.hidden else 0
        self._pace = Pace(costs)
        self._right: deque[int] = deque(maxlen=2)  # levels of the last trees
        self._unchecked = self._check_after = CHECK_FIRST  # tokens since plain decoding was last seen
        self._silent = 0  # times in a row that it had nothing to say
        self._pause = 0  # tokens until it is asked again
        self._step: _Step | None = None
        self.promise = 0.0  # tokens a second expected of its last guess
        self.rate = 0.0  # tokens a second that its guesses have brought lately

    @property
    def off(self) -> str | None:
        if self.account.open:
            return None
        return f"{self.name} drafts do not pay here; next try after {self.account.waits} tokens"

    @property
    def rest(self) -> int:
        if self.account.open:
            return CHECK if self.doubts else self._pause
        return max(0, self.account.waits - self._listens)

    @property
    def doubts(self) -> bool:
        """Whether plain decoding has to be seen again before anything can be said about it."""
        return self.account.open and self._unchecked >= self._check_after

    def propose(self, context: Context) -> ScoredTree | None:
        self._step = None
        if not self.account.open:
            return None  # it only listens
        depth = FURTHER * max(self._right, default=0) + BEYOND
        prices = Prices(self._pace.plain(), self._least)
        tree = self.draft.propose(replace(context, depth=min(depth, context.depth), prices=prices))
        if tree is not None:
            chances = path_probabilities(tree, self.calibration)[1 : self._most_nodes()]
            size, self.promise = best_size(chances, self._pace.seconds(), self._pace.other())
            tree = tree.first(size) if size else None
        if tree is not None:
            self._silent = 0
        elif not self._listens:  # one that needs rows would miss them
            self._silent += 1
            self._pause = min(2**self._silent - 1, SILENCE)
        self._step = _Step(len(context.ids) - 1, tree)
        return tree

    def _most_nodes(self) -> int:
        """Of a tree that could be all wrong without losing more than there is to lose."""
        stake = (1 + max(self.account.credit, STAKE)) * self._pace.plain()
        return next((nodes for nodes, seconds in enumerate(self._pace.seconds()) if seconds > stake), MAX_NODES)

    def observe(self, tokens: Sequence[int], position: int, features: Rows | None, hidden: Rows | None) -> None:
        if not self.account.open and self.rest:
            features = hidden = None  # it would have to work through them when it is tried again
        self.draft.observe(tokens, position, features, hidden)
        step = self._step
        if step is not None and step.position == position and step.tree is not None:
            self._learn(step.tree, tokens)

    def _learn(self, tree: ScoredTree, tokens: Sequence[int]) -> None:
        """Judge the guesses whose parents were right."""
        path, followed = [0], tree.child
        for token in tokens[1:]:
            path.append(followed[path[-1], token])
        for node, (parent, belief) in enumerate(zip(tree.parents.tolist(), tree.conditionals().tolist(), strict=True)):
            if parent in path:
                self.calibration.learn(belief, node in path)
        self._right.append(len(path) - 1)

    def spent(self, tokens: int, seconds: float, forward_seconds: float | None) -> None:
        pace, account, step = self._pace, self.account, self._step
        self._step = None
        if forward_seconds is None:
            pace.decoded(tokens, seconds)
            if self.doubts:
                self._check_after = min(2 * self._check_after, CHECK_LAST)
            self._unchecked = 0
            self._pause = max(0, self._pause - tokens)
        if not account.open:
            account.plain(tokens)
        elif forward_seconds is not None:
            nodes = 1 if step is None or step.tree is None else len(step.tree)
            worth = pace.stepped(nodes, seconds, forward_seconds)
            small = pace.other() + pace.seconds()[BEYOND]
            account.drafted(tokens, worth, small / pace.plain())
            self.rate += 0.1 * (tokens / seconds - self.rate)
            self._unchecked += tokens

    def withdraw(self) -> None:
        """Its guess is not taken."""
        self._step = None

    def missed(self, tokens: int, seconds: float) -> None:
        """Another draft's guess decided `tokens`; this one had taken so many `seconds` to be asked."""
        self._unchecked += tokens
        self._pause = max(0, self._pause - tokens)
        if not self.account.open:
            self.account.plain(tokens)
        else:
            self.account.drafted(0, self._pace.calm(seconds) / self._pace.plain(), 1.0)

    # -- the draft's own business -------------------------------------------------------------------------------------

    def catch_up(self, state: State) -> None:
        if self.account.open:
            self.draft.catch_up(state)

    def reset(self) -> None:
        self._step = None
        self.account.new_text()
        self.draft.reset()

    def snapshot(self) -> Any:
        return self.draft.snapshot()

    def restore(self, saved: Any) -> None:
        self._step = None
        self.account.new_text()
        self.draft.restore(saved)
