"""Choosing from the best logits of a row: what the sampler takes from all of them, or nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warpsmith.backend.base import Want, output_from_logits
from warpsmith.backend.candidates import LOOKED_AT, candidates_needed, choose_among
from warpsmith.backend.sampling import Sampling, choose

VOCAB = 900


def chosen_among(logits: np.ndarray, sampling: Sampling, history: list[int], position: int, off: float) -> int | None:
    """As a device would: the best few, and a sum that is a little off."""
    count = candidates_needed(sampling, history, 0)
    assert count is not None
    best = output_from_logits(logits[None], Want("top", min(count, VOCAB)))
    assert best.top_ids is not None
    assert best.top_logits is not None
    assert best.logsumexp is not None
    logsumexp = float(best.logsumexp[0]) + off
    return choose_among(best.top_ids[0], best.top_logits[0], logsumexp, sampling, history, position)


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 5, 40]),
    top_p=st.sampled_from([1.0, 0.95, 0.5]),
    min_p=st.sampled_from([0.0, 0.05]),
    repeat_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    repeat_last_n=st.sampled_from([-1, 0, 3, 64]),
    logit_bias=st.sampled_from([{}, {}, {7: -2.0, 300: float("-inf")}]),
    seed=st.integers(0, 1 << 30),
)


@settings(max_examples=300, deadline=None)
@given(
    sampling=samplings,
    spread=st.sampled_from([0.01, 1.0, 4.0]),
    levels=st.sampled_from([3, 1000]),
    seed=st.integers(0, 1 << 20),
    off=st.floats(-2e-5, 2e-5),
)
def test_it_is_the_sampler_s_choice_or_none(
    sampling: Sampling, spread: float, levels: int, seed: int, off: float
) -> None:
    """With few levels most logits are equal: ties go to the lowest id."""
    rng = np.random.default_rng(seed)
    logits = (np.round(rng.standard_normal(VOCAB) * levels) / levels * spread).astype(np.float32)
    history = rng.choice(np.argsort(-logits)[:50], int(rng.integers(0, 70))).tolist()
    if candidates_needed(sampling, history, 0) is None:
        return
    found = chosen_among(logits, sampling, history, 12, off)
    assert found is None or found == choose(logits, sampling, history, 12)
    if sampling.temperature <= 0 or sampling.top_k:
        assert found is not None


def test_it_is_seldom_none_where_the_distribution_has_a_head() -> None:
    logits = (np.random.default_rng(0).standard_normal(VOCAB) * 4).astype(np.float32)
    nucleus = Sampling(temperature=0.8, top_p=0.9)
    found = [chosen_among(logits, dataclasses.replace(nucleus, seed=seed), [], 3, 0.0) for seed in range(500)]
    assert found.count(None) <= 5
    assert len(set(found)) > 5


def test_a_sum_that_decides_is_not_trusted() -> None:
    """Two equal logits, and a nucleus that ends exactly where the first one does."""
    logits = np.full(VOCAB, -30.0, np.float32)
    logits[:2] = 0.0
    exact = Sampling(temperature=1.0, top_p=0.5)
    assert chosen_among(logits, exact, [], 0, 0.0) is None
    assert chosen_among(logits, dataclasses.replace(exact, top_p=0.49), [], 0, 0.0) == 0


@pytest.mark.parametrize(
    ("sampling", "count"),
    [
        (Sampling(temperature=0.7, top_k=20), 20),
        (Sampling(temperature=0.7, top_k=20, presence_penalty=1.5, repeat_last_n=64), 20 + 10 + 5),
        (Sampling(temperature=0.7, top_k=20, presence_penalty=1.5, repeat_last_n=12), 20 + 12),
        (Sampling(temperature=0.7, top_k=20, presence_penalty=1.5, repeat_last_n=-1), 20 + 10 + 5),
        (Sampling(repeat_penalty=1.1, logit_bias={3: -1.0}), 1 + 10 + 5 + 1),
        (Sampling(temperature=0.7, top_p=0.9), LOOKED_AT),
        (Sampling(temperature=0.7), None),  # the sum at another temperature is not known
        (Sampling(temperature=1.0), LOOKED_AT),
        (Sampling(temperature=0.7, top_p=0.9, presence_penalty=1.0), None),
        (Sampling(temperature=0.7, top_k=20, presence_penalty=-0.5), None),  # it lifts tokens from anywhere
        (Sampling(temperature=0.7, top_k=20, repeat_penalty=0.9), None),
        (Sampling(temperature=0.7, top_k=20, logit_bias={3: 1.0}), None),
    ],
)
def test_how_many_are_needed(sampling: Sampling, count: int | None) -> None:
    assert candidates_needed(sampling, list(range(10)), 5) == count
