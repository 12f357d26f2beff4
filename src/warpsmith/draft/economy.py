"""What speculation earns and costs: costs of the moment, confidences as they turned out, and an account of both.

A step over n nodes takes the draft's time, that of a forward over n + 1 nodes, and that of the host around them. It is
expected to decide one token more for every node, times the probability that it is right. The best n has the most
expected tokens a second. The draft's probabilities are corrected by what became of earlier ones.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Sequence
from itertools import chain
from statistics import median

import numpy as np

from warpsmith.draft.base import ALONE, Others, ScoredTree
from warpsmith.draft.costs import Costs

BINS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99)  # confidences that part kinds of guesses
PRIOR = 4.0  # how many observations the draft's own word is worth
MEMORY = 256.0  # observations after which the older half counts half
START, MOST = 4.0, 16.0  # the account, in plain tokens
CHANCE = 2.0  # what another text is worth to a draft that rests: less than a hundredth of a short answer
REFILL = 0.005  # a plain token
RECENT = 9  # timings of which the median is taken: a step that was held up does not count


def best_size(
    probabilities: Sequence[float], seconds: Sequence[float], other_seconds: float, certain: int = 1
) -> tuple[int, float]:
    """How many of a draft's nodes to verify for the most expected tokens a second, and how many those are.

    `probabilities` are those of the nodes below the root, in the order in which they would be taken; `seconds` are
    those of a forward over 1, 2, ... nodes, `other_seconds` what a step takes besides. `certain` tokens are decided in
    any case, one for each sequence in the pass. Of equal rates the smaller tree.
    """
    best, best_rate, tokens = 0, certain / (other_seconds + seconds[0]), float(certain)
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

    def stepped_beside(self, others: Others, nodes: int, seconds: float, forward_seconds: float) -> float:
        """A step was made in a pass with other sequences: how many tokens of a pass without guesses the time was worth
        that this one took for its own guesses, and the one that it would have had anyway."""
        costs, sequences = self.costs.seconds, 1 + others.sequences
        whole = costs[nodes + others.nodes - 1]
        guesses = (whole - costs[others.nodes]) / whole * forward_seconds + seconds - forward_seconds
        return 1 + guesses * sequences / (costs[sequences - 1] / whole * forward_seconds)

    def calm(self, other: float) -> float:
        """Seconds of a step besides its forward without the machine's hiccups, or what it takes to begin at all."""
        return min(other, 3 * self.other() if self._other else self.plain())

    def plain(self, others: Others = ALONE) -> float:
        """Seconds of a token without a draft; beside others, its share of the pass."""
        if others.sequences:
            return self.seconds()[others.sequences] / (1 + others.sequences)
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
