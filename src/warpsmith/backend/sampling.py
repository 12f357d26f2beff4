"""The sampler: one row of logits in, one token out. The same for plain decoding and for every node of a drafted tree.

Steps and meaning follow llama.cpp's default chain: logit bias, penalties, top-k, top-p, min-p, temperature, draw. The
truncations see the distribution at temperature 1, because the temperature comes after them.

The draw is a function of (logits, history, seed, position) and of nothing else: its uniform number is a hash of the
seed and of the absolute position of the token being drawn. So the same seed gives the same text with and without
speculation, in any number of calls, and a device can compute the same number on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf, isfinite, isnan, log
from numbers import Integral, Real

import numpy as np

from warpsmith.backend.finite import not_finite
from warpsmith.errors import BadRequest


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; temperature 0 is greedy. Applied in llama.cpp's order:
    logit bias, penalties, top-k, top-p, min-p, temperature, draw."""

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = 64  # tokens the penalties look back on; -1: all
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """True when the choice is the plain argmax of the logits."""
        return self.temperature <= 0 and not self.logit_bias and not self.penalised

    @property
    def penalised(self) -> bool:
        neutral = self.repeat_penalty == 1 and self.presence_penalty == 0 and self.frequency_penalty == 0
        return not neutral and self.repeat_last_n != 0


def choose(logits: np.ndarray, sampling: Sampling, history: Sequence[int], position: int) -> int:
    """The token at absolute `position`, given float32 [vocab] logits and the tokens before it (for the penalties).

    Temperature 0 takes the largest logit after bias and penalties; ties go to the lowest id.
    """
    if not isfinite(logits.max()):
        raise not_finite(position)
    logits = penalise(logits, sampling, history)
    best = int(logits.argmax())
    if logits[best] == -np.inf:
        raise BadRequest("logit_bias bans every token that could come next.", "Leave at least one.")
    if sampling.temperature <= 0:
        return best
    fraction = uniform(sampling.seed, position)
    for ids in _best_first(logits, sampling.top_k):
        candidates = logits[ids].astype(np.float64)
        complete = bool(sampling.top_k) or len(ids) == len(logits)
        index = draw(candidates, sampling, fraction, complete, partial(_sum_of_weights, logits, candidates[0]))
        if index is not None:
            return int(ids[index])
    raise AssertionError("the last candidates are all of them, and one of those is always drawn")


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: two rounds of splitmix64's finaliser over seed and position."""
    bits = mix((mix(seed) + (position + 1) * 0x9E3779B97F4A7C15) & _MASK)
    return (bits >> 11) * 2.0**-53


_MASK = (1 << 64) - 1
_LARGEST = float(np.finfo(np.float32).max)


def mix(z: int) -> int:
    """splitmix64's finaliser."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def penalise(logits: np.ndarray, sampling: Sampling, history: Sequence[int]) -> np.ndarray:
    """The logits after bias and penalties; the input itself when there is nothing to do."""
    window = window_of(sampling, history)
    if not sampling.logit_bias and not len(window):
        return logits
    logits = logits.astype(np.float32)  # a copy
    for token, bias in sampling.logit_bias.items():
        logits[token] += np.float32(bias)
    if len(window):
        seen, counts = np.unique(np.asarray(window, dtype=np.int64), return_counts=True)
        values = logits[seen]
        repeat = np.float32(sampling.repeat_penalty)
        values = np.where(values > 0, values / repeat, values * repeat)  # away from the likely, whatever the sign
        values -= counts.astype(np.float32) * np.float32(sampling.frequency_penalty)
        values -= np.float32(sampling.presence_penalty)
        logits[seen] = values
    return logits


def window_of(sampling: Sampling, history: Sequence[int]) -> Sequence[int]:
    """The tokens the penalties look at."""
    if not sampling.penalised:
        return ()
    return history if sampling.repeat_last_n < 0 else history[-sampling.repeat_last_n :]


def _best_first(logits: np.ndarray, top_k: int) -> Iterator[np.ndarray]:
    """Candidate ids by descending logit, ties by id: the top k, or longer and longer beginnings of the whole order.

    Sorting 248 thousand logits takes ten times longer than finding the best 256, and those nearly always suffice.
    """
    vocab = len(logits)
    for width in (min(top_k, vocab),) if top_k else (256, 8192, vocab):
        if width >= vocab:
            yield np.argsort(-logits, kind="stable")
            return
        least = np.partition(logits, vocab - width)[vocab - width]
        ids = np.flatnonzero(logits >= least)
        yield ids[np.argsort(-logits[ids], kind="stable")][:width]


def _weights(logits: np.ndarray, peak: float, temperature: float) -> np.ndarray:
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to exp(-inf)
        return np.exp((logits.astype(np.float64) - peak) / temperature)


def _sum_of_weights(logits: np.ndarray, peak: float, temperature: float) -> float:
    return float(_weights(logits, peak, temperature).sum())


def draw(
    best: np.ndarray, sampling: Sampling, fraction: float, complete: bool, whole: Callable[[float], float]
) -> int | None:
    """Truncate and draw an index into `best`, float64 logits, best first; None if they are too few to tell.

    They are `complete` if no others are candidates. `whole(temperature)` is the sum of e^((logit - best) / temperature)
    over the vocabulary. Sorted best first, every truncation is a cut to some length. All sums run in this order or over
    the whole vocabulary, so that the answer does not depend on how many were looked at.
    """
    peak = best[0]

    def total(temperature: float, running: np.ndarray) -> float:
        return running[-1] if sampling.top_k else whole(temperature)

    count, cut = len(best), False
    if sampling.top_p < 1:
        running = np.cumsum(_weights(best, peak, 1.0))
        enough = int(np.searchsorted(running, sampling.top_p * total(1.0, running), side="left")) + 1
        if enough > count and not complete:
            return None
        count, cut = min(enough, count), True
    if sampling.min_p > 0:
        likely = int((best[:count] >= peak + log(sampling.min_p)).sum())
        if likely == count and not cut and not complete:
            return None
        count, cut = max(likely, 1), True

    running = np.cumsum(_weights(best[:count], peak, sampling.temperature))
    target = fraction * (running[-1] if cut else total(sampling.temperature, running))
    index = int(np.searchsorted(running, target, side="right"))
    if index >= count and not cut and not complete:
        return None
    # rounding may leave the target a hair above the last running sum: then the last that adds to it, and not a token
    # that cannot be, such as one that a grammar forbids
    return min(index, int(np.searchsorted(running, running[-1], side="left")))


def check_bias(sampling: Sampling, vocab: int) -> None:
    """Refuse a bias that has no meaning."""
    for token, bias in sampling.logit_bias.items():
        if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= token < vocab:
            raise BadRequest(f"logit_bias names token {token!r}, outside [0, {vocab}).", "Use ids of this model.")
        number = isinstance(bias, Real) and not isinstance(bias, bool)
        if not number or isnan(bias) or (abs(bias) > _LARGEST and bias != -inf):
            raise BadRequest(
                f"logit_bias of token {token} is {bias!r}.", "Use a finite number, or -inf to ban a token."
            )
    if sum(bias == -inf for bias in sampling.logit_bias.values()) == vocab:
        raise BadRequest("logit_bias bans every token.", "Leave at least one.")
