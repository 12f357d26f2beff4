"""How a GPU draws a token, without a GPU: its rules, compiled by themselves, and a model of who knows what on it.

The device may leave a token undecided, but where it decides it must decide as the sampler does.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from test_sampling import samplings
from warpsmith.backend.cuda.build.compiler import SOURCES
from warpsmith.backend.cuda.sampler import draw_of
from warpsmith.backend.cuda.shape import CANDIDATES, ROUNDS
from warpsmith.backend.cuda.structures import Draw
from warpsmith.backend.sampling import Sampling, choose, penalise, uniform

TOO_CLOSE, TOO_FEW = -1, -2
NEGLIGIBLE = -40

PROGRAM = """
#define __device__
#define __forceinline__ inline
struct int2 { int x, y; };
#include "sample/decide.cuh"
extern "C" int draw_size() { return sizeof(Draw); }
extern "C" double uniform_of(const Draw* d, int position) { return uniform_at(*d, position); }
extern "C" float penalised_of(const Draw* d, float logit, int count) { return penalised(*d, logit, count); }
extern "C" bool total_needed(const Draw* d) { return needs_total(*d); }
extern "C" double scale_of(const Draw* d) { return total_scale(*d); }
extern "C" int decided(const Draw* d, int n, const float* logits, const double* weight, const double* heated,
                       double total, double fraction) {
    return decide(*d, n, [&](int i) { return logits[i]; }, weight, heated, total, fraction);
}
"""


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("rules")
    (folder / "rules.cpp").write_text(PROGRAM)
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    command = [compiler, *flags, f"-I{Path(str(SOURCES))}", "-o", str(folder / "rules.so"), str(folder / "rules.cpp")]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(folder / "rules.so"))
    pointer, number = ctypes.c_void_p, ctypes.c_double
    library.uniform_of.restype = library.scale_of.restype = number
    library.penalised_of.restype = ctypes.c_float
    library.penalised_of.argtypes = [pointer, ctypes.c_float, ctypes.c_int]
    library.total_needed.restype = ctypes.c_bool
    library.decided.argtypes = [pointer, ctypes.c_int, pointer, pointer, pointer, number, number]
    return library


def off_by_a_little(values: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """As another exp, or another order of summing, would have it."""
    return values * (1 + random.uniform(-1, 1, values.shape) * 1e-13)


def device_choice(
    rules: ctypes.CDLL, logits: np.ndarray, sampling: Sampling, history: Sequence[int], position: int, sms: int
) -> int | None:
    """What the kernel finds, step by step as sample.cuh describes it; None: undecided."""
    draw, random = draw_of(sampling), np.random.default_rng(position)
    at = ctypes.byref(draw)
    tweaked = penalise(logits, sampling, history)
    if sampling.temperature <= 0:
        return int(tweaked.argmax())
    order = np.argsort(-tweaked, kind="stable")
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))  # stands for `ranked`: smaller is better
    owner = np.arange(len(tweaked)) * sms // len(tweaked)
    best = np.sort(np.minimum.reduceat(place, np.searchsorted(owner, np.arange(sms))))
    peak = float(tweaked[order[0]])
    total = 0.0
    if rules.total_needed(at):
        exponents = (tweaked.astype(np.float64) - peak) * rules.scale_of(at)
        total = float(off_by_a_little(np.exp(exponents[exponents > NEGLIGIBLE]), random).sum())
    by_min_p = sampling.top_k == 0 and sampling.min_p > 0
    limit = min(sampling.top_k or sms, sms)
    reach = limit if sampling.top_k else (sms + 1) // 2
    for _ in range(ROUNDS):
        count = int((tweaked >= peak + draw.log_min_p).sum()) if by_min_p else best[reach - 1] + 1
        index, following = TOO_FEW, max(1, reach // 2)
        if count <= CANDIDATES:
            values = tweaked[order[:count]]
            below = values.astype(np.float64) - peak
            weight = off_by_a_little(np.exp(below), random)
            heated = off_by_a_little(np.exp(below * draw.inverse_temperature), random)
            pointers = (array.ctypes.data for array in (values, weight, heated))
            index = rules.decided(at, count, *pointers, total, rules.uniform_of(at, position))
            few = count < (sampling.top_k or CANDIDATES // 2)
            following = min(limit, reach + (limit - reach + 1) // 2) if few else reach
        if index >= 0:
            return int(order[index])
        if index == TOO_CLOSE or by_min_p or following == reach:
            return None
        reach = following
    return None


def test_both_sides_mean_the_same_struct(rules: ctypes.CDLL) -> None:
    assert rules.draw_size() == ctypes.sizeof(Draw)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 2))
def test_the_number_drawn_is_the_sampler_s(rules: ctypes.CDLL, seed: int, position: int) -> None:
    draw = draw_of(Sampling(temperature=1, seed=seed))
    assert rules.uniform_of(ctypes.byref(draw), position) == uniform(seed, position)


@settings(max_examples=100, deadline=None)
@given(samplings, st.floats(-40, 40, width=32), st.integers(1, 300))
def test_penalties_are_the_sampler_s_to_the_bit(
    rules: ctypes.CDLL, sampling: Sampling, logit: float, count: int
) -> None:
    without_bias = Sampling(**{**vars(sampling), "logit_bias": {}, "repeat_last_n": -1})
    expected = penalise(np.array([0, logit], dtype=np.float32), without_bias, [1] * count)[1]
    if without_bias.penalised:
        assert rules.penalised_of(ctypes.byref(draw_of(without_bias)), logit, count) == expected


@settings(max_examples=200, deadline=None)
@given(st.data(), samplings, st.integers(0, 2**30))
def test_what_is_decided_is_what_the_sampler_chooses(
    rules: ctypes.CDLL, data: st.DataObject, sampling: Sampling, position: int
) -> None:
    """Few tokens, many ties, few SMs: everything that can go wrong is near."""
    values = st.one_of(st.floats(-12, 12, width=32), st.sampled_from([0.0, -0.0, 1.0, 1.5, float("-inf")]))
    logits = np.array([3.0, *data.draw(st.lists(values, min_size=3, max_size=60))], dtype=np.float32)
    history = data.draw(st.lists(st.integers(0, 3), max_size=8))
    token = device_choice(rules, logits, sampling, history, position, data.draw(st.integers(1, 4)))
    assert token in (None, choose(logits, sampling, history, position))


SETTINGS = [
    Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
    Sampling(temperature=0.7, top_k=20, top_p=0.8),
    Sampling(temperature=1.0, top_k=20, top_p=0.95),
    Sampling(temperature=1.0, min_p=0.02),
    Sampling(temperature=1.5, top_k=1),
    Sampling(temperature=0.6, top_p=0.9),
    Sampling(temperature=1.0),
    Sampling(temperature=0.3),
    Sampling(temperature=1.0, top_k=20, repeat_penalty=1.1, presence_penalty=1.5, logit_bias={7: 3.0}),
]


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("crowd", [False, True])
def test_ordinary_settings_are_decided(rules: ctypes.CDLL, sampling: Sampling, crowd: bool) -> None:
    """On rows as peaked as a trained model's; `crowd`: where most likely tokens have small ids, as in real
    vocabularies, and so belong to few SMs."""
    random = np.random.default_rng(3)
    undecided, draws, vocab = 0, 60, 20_000
    history = random.integers(0, vocab, 64).tolist()
    for position in range(draws):
        ranks = np.arange(1, vocab + 1) if crowd else random.permutation(vocab) + 1
        logits = (-2.0 * np.log(ranks) + random.gumbel(0, 1.0, vocab)).astype(np.float32)
        token = device_choice(rules, logits, sampling, history, position, 132)
        undecided += token is None
        assert token in (None, choose(logits, sampling, history, position))
    assert undecided <= (2 if sampling == Sampling(temperature=1.0) else 0)


def test_a_row_that_is_flat_is_left_undecided(rules: ctypes.CDLL) -> None:
    logits = np.random.default_rng(4).normal(0, 0.1, 20_000).astype(np.float32)
    drawn = [device_choice(rules, logits, Sampling(temperature=1.0), [], position, 132) for position in range(40)]
    assert drawn.count(None) > 30


def test_sums_too_close_to_tell_are_left_undecided(rules: ctypes.CDLL) -> None:
    """Two equal tokens and top-p 0.5: whether one is enough hangs on the last bit."""
    logits = np.full(200, -30.0, dtype=np.float32)
    logits[[5, 150]] = 2.0
    tie = Sampling(temperature=1.0, top_k=2, top_p=0.5)
    assert device_choice(rules, logits, tie, [], 0, 8) is None
    near = Sampling(temperature=1.0, top_k=2, top_p=0.5001)
    assert {device_choice(rules, logits, near, [], position, 8) for position in range(20)} == {5, 150}
