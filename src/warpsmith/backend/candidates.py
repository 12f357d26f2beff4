"""The sampler's choice from the best logits of a row alone, where these decide it.

A device finds the best few of 248 thousand logits sooner than the host has read the row. The choice is `choose`'s own
or none: it is left open where another logit, or the last bits of the sum over all of them, could make a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp, isfinite

import numpy as np

from warpsmith.backend.sampling import Sampling, choose, draw, uniform, window_of

LOOKED_AT = 128  # of a row, where no top-k says how many there are


def candidates_needed(sampling: Sampling, history: Sequence[int], more: int) -> int | None:
    """How many of a row's best logits to look at after a history that has grown by up to `more` tokens; None: all.

    Penalties and biases that only lower logits leave the best k among the best k and as many more as they touch.
    """
    touched = len(sampling.logit_bias)
    if sampling.penalised:
        window = len(window_of(sampling, history)) + more
        touched += window if sampling.repeat_last_n < 0 else min(window, sampling.repeat_last_n)
    penalties = (sampling.repeat_penalty - 1, sampling.presence_penalty, sampling.frequency_penalty)
    if touched and (min(penalties) < 0 or any(bias > 0 for bias in sampling.logit_bias.values())):
        return None
    if sampling.temperature <= 0:
        return 1 + touched
    if sampling.top_k:
        return sampling.top_k + touched
    decided = sampling.top_p < 1 or sampling.min_p > 0 or sampling.temperature == 1
    return LOOKED_AT if decided and not touched else None


def choose_among(
    ids: np.ndarray, logits: np.ndarray, logsumexp: float, sampling: Sampling, history: Sequence[int], position: int
) -> int | None:
    """What `choose` takes from a row, given as many of its best as are needed, best first, and the logarithm of the sum
    of all its exponentials in single precision; None where that is left open."""
    if not isfinite(logits[0]):
        return None  # whoever looks at the whole row says what is wrong with it
    if sampling.temperature > 0 and not sampling.top_k:
        best, error = logits.astype(np.float64), 1e-4 + 1e-7 * abs(logsumexp)
        total, fraction = exp(logsumexp - best[0]), uniform(sampling.seed, position)

        def drawn(sum_of_all: float) -> int | None:
            return draw(best, sampling, fraction, complete=False, whole=lambda temperature: sum_of_all)

        # all cuts grow with the sum: where both ends of what it may be agree, so does what it is
        index = drawn(total * (1 - error))
        return None if index is None or index != drawn(total * (1 + error)) else int(ids[index])
    order = np.argsort(ids)  # of equal logits the lower id comes first
    place = {token: i for i, token in enumerate(ids[order].tolist())}
    window = [place[token] for token in window_of(sampling, history) if token in place]
    bias = {place[token]: amount for token, amount in sampling.logit_bias.items() if token in place}
    among = choose(logits[order], replace(sampling, logit_bias=bias, repeat_last_n=-1), window, position)
    return int(ids[order[among]])
