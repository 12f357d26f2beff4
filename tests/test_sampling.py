"""The sampler against slow, obvious versions of each rule, and its draws against the distribution they should have."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from warpsmith.backend import sampling as module
from warpsmith.backend.sampling import Sampling, choose, penalise, uniform
from warpsmith.cli.options import sampler_arguments, sampler_keywords
from warpsmith.engine.request import SAMPLING, Options, check_sampling, sampling_for
from warpsmith.errors import BadRequest
from warpsmith.model.chat import declared_sampling


def slow_distribution(logits: np.ndarray, sampling: Sampling, history: list[int]) -> dict[int, float]:
    """Token -> probability, rule by rule in plain Python as llama.cpp's chain describes them."""
    values = {i: float(v) for i, v in enumerate(logits)}
    for token, bias in sampling.logit_bias.items():
        values[token] += bias
    n = sampling.repeat_last_n
    window = [] if n == 0 else history if n < 0 else history[-n:]
    for token, count in Counter(window).items():
        value = values[token]
        value = value * sampling.repeat_penalty if value <= 0 else value / sampling.repeat_penalty
        values[token] = value - count * sampling.frequency_penalty - sampling.presence_penalty
    order = sorted(values, key=lambda i: (-values[i], i))
    if sampling.temperature <= 0:
        return {order[0]: 1.0}
    if sampling.top_k:
        order = order[: sampling.top_k]
    peak = values[order[0]]

    def softmax(ids: list[int], temperature: float) -> list[float]:
        weights = [math.exp((values[i] - peak) / temperature) for i in ids]
        return [w / math.fsum(weights) for w in weights]

    if sampling.top_p < 1:
        running, keep = 0.0, 0
        for p in softmax(order, 1.0):
            running, keep = running + p, keep + 1
            if running >= sampling.top_p:
                break
        order = order[:keep]
    if sampling.min_p > 0:
        best, *rest = order
        order = [best, *(i for i in rest if values[i] >= peak + math.log(sampling.min_p))]
    return dict(zip(order, softmax(order, sampling.temperature), strict=True))


def chi_square_p(observed: Counter[int], expected: dict[int, float], draws: int) -> float:
    """The p-value, by Wilson and Hilferty's approximation; cells expected less than five times are pooled."""
    cells, rare_seen, rare_expected = [], 0.0, 0.0
    for token, probability in expected.items():
        if probability * draws < 5:
            rare_seen, rare_expected = rare_seen + observed[token], rare_expected + probability * draws
        else:
            cells.append((observed[token], probability * draws))
    if rare_expected > 1:
        cells.append((rare_seen, rare_expected))
    freedom = len(cells) - 1
    if freedom < 1:
        return 1.0
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2))


SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.3),
    Sampling(temperature=2.5),
    Sampling(temperature=1.0, top_k=5),
    Sampling(temperature=0.8, top_p=0.8),
    Sampling(temperature=1.5, min_p=0.1),
    Sampling(temperature=0.7, top_k=10, top_p=0.9, min_p=0.02),
    Sampling(temperature=1.2, repeat_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, repeat_last_n=8),
    Sampling(temperature=1.0, logit_bias={3: 4.0, 5: -100.0, 7: float("-inf")}),
]


@pytest.mark.parametrize("sampling", SETTINGS)
def test_draws_have_the_right_distribution(sampling: Sampling) -> None:
    logits = np.random.default_rng(1).normal(0, 2, 24).astype(np.float32)
    history = [2, 3, 3, 11, 11, 11, 20, 3, 3]
    draws = 4000
    seen = Counter(choose(logits, sampling, history, position) for position in range(draws))
    expected = slow_distribution(logits, sampling, history)
    assert set(seen) <= {token for token, p in expected.items() if p > 0}
    assert chi_square_p(seen, expected, draws) > 0.01


def test_chi_square_notices_a_wrong_temperature() -> None:
    logits = np.random.default_rng(1).normal(0, 2, 24).astype(np.float32)
    seen = Counter(choose(logits, Sampling(temperature=1.3), [], position) for position in range(4000))
    assert chi_square_p(seen, slow_distribution(logits, Sampling(temperature=1.0), []), 4000) < 0.01


def test_seeds_give_independent_draws_at_one_position() -> None:
    logits = np.random.default_rng(2).normal(0, 1, 16).astype(np.float32)
    seen = Counter(choose(logits, Sampling(temperature=1.0, seed=seed), [], 7) for seed in range(4000))
    assert chi_square_p(seen, slow_distribution(logits, Sampling(temperature=1.0), []), 4000) > 0.01


finite = st.floats(-12, 12, width=32)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-6, 0.2, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 3, 100]),
    top_p=st.sampled_from([0.0, 0.35, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.07, 0.6, 1.0]),
    repeat_penalty=st.sampled_from([1.0, 1.25, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.75, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.25]),
    repeat_last_n=st.sampled_from([-1, 0, 1, 4]),
    logit_bias=st.dictionaries(st.integers(0, 3), st.sampled_from([-2.0, 1.5]), max_size=2),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(finite, min_size=4, max_size=30), samplings, st.lists(st.integers(0, 3), max_size=8), st.data())
def test_every_draw_is_the_inverse_cdf_of_the_slow_distribution(
    values: list[float], sampling: Sampling, history: list[int], data: st.DataObject
) -> None:
    logits = np.array(values, dtype=np.float32)
    position = data.draw(st.integers(0, 1 << 40))
    token = choose(logits, sampling, history, position)
    expected = slow_distribution(logits, sampling, history)
    before = 0.0
    for candidate, probability in expected.items():  # in the order of the draw: best first, ties by id
        if candidate == token:
            break
        before += probability
    else:
        # float32 penalties may order two nearly equal logits, or place a cut, differently from float64
        tweaked = penalise(logits, sampling, history)
        near = min(abs(float(tweaked[token] - tweaked[other])) for other in expected)
        assert near < 1e-4, (token, expected)
        return
    fraction = uniform(sampling.seed, position)
    if sampling.temperature > 1e-3:
        assert before - 1e-4 <= fraction <= before + expected[token] + 1e-4


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=3.0),
        Sampling(temperature=1.0, top_p=0.9),
        Sampling(temperature=0.5, top_p=0.5),
        Sampling(temperature=2.0, min_p=0.6),
        Sampling(temperature=5.0, min_p=0.001),
        Sampling(temperature=1.0, top_p=0.99, min_p=0.01),
        Sampling(temperature=1.0, top_k=1000),
        Sampling(temperature=1.0, top_k=1000, top_p=0.7, min_p=0.2),
    ],
)
def test_a_large_vocabulary_is_drawn_as_if_it_were_sorted_whole(sampling: Sampling, spread: float) -> None:
    """Looking only at the best few candidates first is a short cut that changes no answer."""
    logits = np.random.default_rng(3).normal(0, spread, 12_000).astype(np.float32).round(2)  # many ties
    order = np.argsort(-logits, kind="stable")
    ranked = logits[order].astype(np.float64) - logits.max()
    count = sampling.top_k or len(order)
    if sampling.top_p < 1:
        running = np.cumsum(np.exp(ranked[:count]))
        count = int((running < sampling.top_p * running[-1]).sum()) + 1
    if sampling.min_p > 0:
        count = int((ranked[:count] >= math.log(sampling.min_p)).sum())
    running = np.cumsum(np.exp(ranked[:count] / sampling.temperature))
    for position in range(40):
        target = uniform(0, position) * running[-1]
        assert choose(logits, sampling, [], position) == order[int((running <= target).sum())]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(finite, min_size=2, max_size=20), st.integers(1, 25), st.floats(0, 1), st.floats(0, 1), st.integers(0, 500)
)
def test_truncations_keep_what_they_promise(
    values: list[float], k: int, top_p: float, min_p: float, position: int
) -> None:
    logits = np.array(values, dtype=np.float32)
    hot = 50.0  # after truncation nearly uniform: every kept token is drawn sometimes
    ranks = {int(t): r for r, t in enumerate(np.argsort(-logits, kind="stable"))}
    assert ranks[choose(logits, Sampling(temperature=hot, top_k=k), [], position)] < k
    token = choose(logits, Sampling(temperature=hot, min_p=min_p), [], position)
    assert logits[token] >= logits.max() + math.log(min_p) - 1e-5 if min_p > 0 else True
    token = choose(logits, Sampling(temperature=hot, top_p=top_p), [], position)
    p = np.exp(logits.astype(np.float64) - logits.max())
    p /= p.sum()
    better = sum(p[t] for t, r in ranks.items() if r < ranks[token])
    assert better < top_p + 1e-9 or ranks[token] == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(finite, min_size=4, max_size=12), samplings, st.lists(st.integers(0, 3), max_size=80))
def test_penalties_equal_a_loop_over_tokens(values: list[float], sampling: Sampling, history: list[int]) -> None:
    logits = np.array(values, dtype=np.float32)
    kept = logits.copy()
    got = penalise(logits, sampling, history)
    assert np.array_equal(logits, kept), "the backend's logits are not ours to change"
    for token, value in enumerate(values):
        expected = value + sampling.logit_bias.get(token, 0.0)
        n = sampling.repeat_last_n
        count = (history if n < 0 else history[len(history) - min(n, len(history)) :]).count(token)
        if count:
            expected = expected / sampling.repeat_penalty if expected > 0 else expected * sampling.repeat_penalty
            expected -= count * sampling.frequency_penalty + sampling.presence_penalty
        assert got[token] == pytest.approx(expected, abs=1e-4)


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = np.array([1, 5, 2, 5, 5], dtype=np.float32)
    assert choose(logits, Sampling(), [], 0) == 1
    assert choose(logits, Sampling(logit_bias={1: -0.5}), [], 0) == 3
    assert choose(logits, Sampling(repeat_penalty=1.1), [1, 3], 0) == 4


def test_the_uniform_numbers_are_fixed_for_ever() -> None:
    """Texts made with a seed stay reproducible, and a device kernel has something to match."""
    assert uniform(0, 0) == 0.8833108082136426
    assert uniform(42, 1000) == 0.8440051422667861
    values = np.array([uniform(7, p) for p in range(20_000)])
    assert values.min() >= 0
    assert values.max() < 1
    assert abs(values.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"repeat_penalty": 0}, "repeat_penalty is 0, and must be positive"),
        ({"repeat_penalty": -1e-300}, "repeat_penalty"),
        ({"repeat_last_n": -2}, "repeat_last_n"),
        ({"presence_penalty": float("inf")}, "presence_penalty"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"logit_bias": {10: 1.0}}, "logit_bias"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
    ],
)
def test_meaningless_parameters_are_refused_by_name(bad: dict, word: str) -> None:
    with pytest.raises(BadRequest, match=word) as caught:
        check_sampling(Sampling(**bad), vocab=10)
    assert caught.value.fix


def test_sensible_parameters_pass() -> None:
    check_sampling(Sampling(), vocab=10)
    check_sampling(
        Sampling(temperature=np.float32(0.7), top_k=40, top_p=0.0, logit_bias={9: float("-inf")}, seed=2**64 - 1), 10
    )


def test_there_is_one_list_of_parameters() -> None:
    """The sampler's fields, the API's keywords and the command line's flags are those of the list."""
    names = {parameter.name for parameter in SAMPLING}
    fields = {field.name: field.type for field in dataclasses.fields(Sampling)}
    assert fields == {p.name: p.kind.__name__ for p in SAMPLING} | {"logit_bias": "dict[int, float]"}
    assert names <= set(Options.__annotations__)
    parser = argparse.ArgumentParser()
    sampler_arguments(parser.add_argument_group())
    assert names | {"logit_bias"} == set(vars(parser.parse_args([])))
    declared = {name for name in Options.__annotations__ if declared_sampling({f"general.sampling.{name}": 1.0})}
    assert {p.name for p in SAMPLING if p.declared} == declared | {"temperature"}
    for parameter in SAMPLING:
        given = parser.parse_args([parameter.flag, "7"])
        assert sampler_keywords(given) == {parameter.name: parameter.kind(7)}


def test_what_a_request_leaves_out_is_the_file_s_or_the_list_s() -> None:
    by_default = sampling_for({"seed": 3}, {})
    assert by_default == Sampling(top_k=20, top_p=0.95, seed=3)
    check_sampling(by_default, 10)
    assert sampling_for({"seed": 3, "top_p": 1.0, "min_p": None}, {"top_p": 0.5, "min_p": 0.1}).top_p == 1.0
    assert sampling_for({"seed": 3, "min_p": None}, {"min_p": 0.1}).min_p == 0.1
    drawn = {sampling_for({}, {}).seed for _ in range(20)}
    assert len(drawn) == 20, "each request draws its own seed"


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([0.0, 1e-3, 0.7, 1.0, 50.0]),
    st.sampled_from([0, 1, 5, 40, 9000]),
    st.sampled_from([0.0, 1e-9, 0.5, 0.999999999, 1.0]),
    st.sampled_from([0.0, 1e-300, 0.1, 1.0]),
    st.sampled_from([0.0, 0.5, 1 - 2.0**-30, 1 - 2.0**-53]),
    st.sampled_from([0.0, -60.0, -1e30]),
)
@example(0, 1.0, 0, 1.0, 0.0, 1 - 2.0**-53, 0.0)
@example(1, 1.0, 0, 1.0, 0.0, 1 - 2.0**-53, 0.0)
@example(2, 1.0, 0, 1.0, 0.0, 1 - 2.0**-53, 0.0)
@example(3, 1.0, 0, 1.0, 0.0, 1 - 2.0**-53, 0.0)
def test_a_forbidden_token_is_never_drawn(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, fraction: float, below: float
) -> None:
    """Whatever the settings, the draw, and how unlikely those that are allowed were."""
    rng = np.random.default_rng(seed)
    vocab = int(rng.integers(2, 9000))
    logits = (rng.standard_normal(vocab) * rng.choice([0.1, 1.0, 5.0])).astype(np.float32)
    allowed = rng.random(vocab) < rng.choice([0.001, 0.5, 0.999])
    allowed[rng.integers(vocab)] = True
    row = np.where(allowed, logits + np.float32(below), -np.inf).astype(np.float32)
    drawing = Sampling(temperature, top_k, top_p, min_p, repeat_penalty=1.1, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "uniform", lambda seed, position: fraction)
        assert allowed[choose(row, drawing, rng.integers(vocab, size=70).tolist(), 5)]
