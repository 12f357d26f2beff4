"""Tokens drawn on a GPU are the sampler's, wherever they are decided; so are the best k and the log-sum-exp."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from device_checks import same_state
from test_cuda import SHAPE, bf16_tensors, ids
from warpsmith.backend.base import LOGITS, Want, output_from_logits
from warpsmith.backend.cuda.sampler import MAX_BIASES
from warpsmith.backend.cuda.top import MAX_TOP
from warpsmith.backend.cuda.weights_first import WeightsFirstBackend
from warpsmith.backend.sampling import Sampling, choose
from warpsmith.backend.tree import Tree
from warpsmith.checkpoint.canonical import open_checkpoint
from warpsmith.draft.ngram import NGram
from warpsmith.engine.loop import Generation
from warpsmith.engine.scheduler import Scheduler
from warpsmith.errors import NoDevice
from warpsmith.model.weights import read_config
from warpsmith.wisp import WISP

pytestmark = pytest.mark.gpu

WATCHDOG = {"WATCHDOG_CYCLES": "4000000000ll"}
LSE_BOUND = 1e-5  # sums of float32 exponentials, against the float32 sums of numpy

ORDINARY = [
    Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
    Sampling(temperature=0.7, top_k=20, top_p=0.8),
    Sampling(temperature=1.0, top_k=20, top_p=0.95, presence_penalty=1.5),
    Sampling(temperature=0.6, top_p=0.9),
    Sampling(temperature=1.0, min_p=0.05),
    Sampling(temperature=0.9, top_k=30, repeat_penalty=1.1, frequency_penalty=0.2, repeat_last_n=8),
    Sampling(temperature=1.0, top_k=10, repeat_penalty=1.3, repeat_last_n=-1, logit_bias={5: 2.0, 300: -100.0}),
    Sampling(repeat_penalty=1.2, presence_penalty=0.5),
    Sampling(logit_bias={77: 3.0, 78: float("-inf")}),
]
EXTREME = [
    Sampling(temperature=1.0),
    Sampling(temperature=10.0),  # nearly everything is left to the host
    Sampling(temperature=1e-6),
    Sampling(temperature=3.0, top_k=1),
    Sampling(temperature=2.0, top_k=90, top_p=0.999999),
    Sampling(temperature=1.0, top_k=50, top_p=0.0),
    Sampling(temperature=1.5, top_p=0.5, min_p=0.9),
    Sampling(temperature=1.0, min_p=1.0),
    Sampling(temperature=1.0, min_p=1e-30),  # more candidates than there is room for
    Sampling(temperature=1.0, top_k=3, repeat_penalty=5.0, frequency_penalty=-2.0, repeat_last_n=1),
    Sampling(temperature=1.0, top_k=2000),  # the host's alone
    Sampling(temperature=1e-310, top_k=4),
    Sampling(temperature=1.0, top_k=8, logit_bias={i: (i % 7) - 3.0 for i in range(MAX_BIASES)}),
]


@pytest.fixture(scope="module")
def random_model() -> WeightsFirstBackend:
    try:
        return WeightsFirstBackend(SHAPE, bf16_tensors(SHAPE, seed=1), options=WATCHDOG)
    except NoDevice as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def wisp() -> WeightsFirstBackend:
    checkpoint = open_checkpoint(WISP)
    try:
        config = replace(read_config(checkpoint), context=2048, mtp_layers=0)
        return WeightsFirstBackend(config, checkpoint.tensors, options=WATCHDOG)
    except NoDevice as error:
        pytest.skip(str(error))


def written(backend: WeightsFirstBackend, seed: int) -> list[int]:
    """A text the model is at home in: a few tokens of anything, and how it goes on."""
    start = ids(seed, 8) % backend.config.vocab
    state = backend.new_state(128)
    backend.prefill(state, start[:-1])
    return [*start.tolist(), *backend.decode(state, int(start[-1]), 40)]


def by_the_host(backend: WeightsFirstBackend, prompt: list[int], sampling: Sampling, count: int) -> list[int]:
    """Forward, choose, commit."""
    state, text = backend.new_state(512), list(prompt)
    backend.prefill(state, prompt[:-1])
    for _ in range(count):
        logits = backend.forward([(state, Tree.chain(text[-1:]))], LOGITS).logits.numpy()
        assert logits is not None
        backend.commit(state, [0])
        text.append(choose(logits[0], sampling, text, len(text)))
    return text[len(prompt) :]


def by_the_device(
    backend: WeightsFirstBackend, prompt: list[int], sampling: Sampling, count: int, stop: int = -1
) -> list[int]:
    state = backend.new_state(512)
    backend.prefill(state, prompt[:-1])
    tokens = list(backend.decode(state, prompt[-1], count, frozenset([stop]) - {-1}, sampling, prompt))
    assert state.length == len(prompt) - 1 + len(tokens)
    return tokens


@pytest.mark.parametrize("sampling", ORDINARY, ids=str)
def test_wisp_draws_what_the_sampler_chooses(wisp: WeightsFirstBackend, sampling: Sampling) -> None:
    wisp.undecided = 0
    for seed in (0, 2**64 - 1, 5):
        prompt, chosen = written(wisp, seed % 1000), replace(sampling, seed=seed)
        assert by_the_device(wisp, prompt, chosen, 100) == by_the_host(wisp, prompt, chosen, 100)
    print(f"{wisp.undecided} of 300 left to the host")
    assert wisp.undecided <= (15 if sampling.top_k == 0 and sampling.min_p == 0 else 1)


@pytest.mark.parametrize("sampling", [*ORDINARY, *EXTREME], ids=lambda s: f"{str(s)[:90]}")
def test_a_random_model_draws_what_the_sampler_chooses(random_model: WeightsFirstBackend, sampling: Sampling) -> None:
    random_model.undecided = 0
    for seed in (1, 12345):
        prompt, chosen = ids(seed, 30).tolist(), replace(sampling, seed=seed)
        expected = by_the_host(random_model, prompt, chosen, 70)
        assert by_the_device(random_model, prompt, chosen, 70) == expected
    print(f"{random_model.undecided} of 140 left to the host")


def test_what_is_left_to_the_host_is_decided_there(random_model: WeightsFirstBackend) -> None:
    flat, prompt = Sampling(temperature=10.0, seed=3), ids(8, 30).tolist()
    random_model.undecided = 0
    assert by_the_device(random_model, prompt, flat, 20) == by_the_host(random_model, prompt, flat, 20)
    assert random_model.undecided > 3


def test_a_stop_id_ends_it(wisp: WeightsFirstBackend) -> None:
    prompt, sampling = written(wisp, 3), replace(ORDINARY[0], seed=9)
    tokens = by_the_device(wisp, prompt, sampling, 90)
    stop = tokens[75]
    assert by_the_device(wisp, prompt, sampling, 90, stop) == tokens[: tokens.index(stop) + 1]


@pytest.mark.parametrize("sampling", [ORDINARY[5], Sampling(temperature=10.0)], ids=["decided", "undecided"])
@pytest.mark.parametrize("heard", [1, 5, 66])
def test_a_listener_who_leaves_finds_the_state_where_he_left(
    random_model: WeightsFirstBackend, sampling: Sampling, heard: int
) -> None:
    state, twin, prompt = random_model.new_state(256), random_model.new_state(256), ids(9, 20).tolist()
    for each in (state, twin):
        random_model.prefill(each, prompt[:-1])
    listening = random_model.decode(state, prompt[-1], 100, frozenset(), sampling, prompt)
    tokens = [next(listening) for _ in range(heard)]
    listening.close()
    assert list(random_model.decode(twin, prompt[-1], heard, frozenset(), sampling, prompt)) == tokens
    assert same_state(SHAPE, state, twin)


@pytest.mark.parametrize("sampling", [ORDINARY[0], ORDINARY[5], Sampling(temperature=1.0)], ids=str)
def test_the_text_is_the_same_with_a_draft(wisp: WeightsFirstBackend, sampling: Sampling) -> None:
    accepted = 0
    for seed in range(4):
        prompt, chosen = written(wisp, seed) * 2, replace(sampling, seed=seed)  # something to look up
        texts = []
        for draft in (None, NGram(7)):
            generation = Generation(Scheduler(wisp, 512, draft), prompt, chosen, max_tokens=80)
            texts.append([token for run in generation for token in run])
            accepted += generation.stats.accepted_tokens
        assert texts[0] == texts[1]
    print(f"{accepted} drafted tokens became text")


@pytest.mark.parametrize("top", [1, 7, 64, MAX_TOP, MAX_TOP + 1])
@pytest.mark.parametrize("nodes", [1, 22, 64])
def test_the_best_and_the_log_sum_exp(random_model: WeightsFirstBackend, nodes: int, top: int) -> None:
    if nodes > random_model.largest_tree:
        pytest.skip(f"trees on this chip have at most {random_model.largest_tree} nodes")
    state = random_model.new_state(128)
    random_model.prefill(state, ids(4, 20))
    tree = Tree.chain(ids(5, nodes))
    logits = random_model.forward([(state, tree)], LOGITS).logits.numpy()
    assert logits is not None
    expected, got = (
        output_from_logits(logits, Want("top", top)),
        random_model.forward([(state, tree)], Want("top", top)),
    )
    np.testing.assert_array_equal(got.top_ids, expected.top_ids)
    np.testing.assert_array_equal(got.top_logits, expected.top_logits)
    np.testing.assert_array_equal(got.argmax, expected.argmax)
    assert got.logsumexp is not None
    assert got.logsumexp.dtype == np.float32
    np.testing.assert_allclose(got.logsumexp, expected.logsumexp, atol=LSE_BOUND, rtol=0)


def test_the_best_of_rows_that_are_hard(random_model: WeightsFirstBackend) -> None:
    """Ties everywhere, one value, zeros of both signs, and the best so placed that a thread has too many of them."""
    vocab, random = SHAPE.vocab, np.random.default_rng(6)
    rows = [random.normal(size=vocab).round(1), np.zeros(vocab), np.copysign(0.0, random.normal(size=vocab))]
    rows += [np.sort(random.normal(size=vocab)), np.where(random.random(vocab) < 0.9, -np.inf, 1.0)]
    logits = np.array(rows, dtype=np.float32)
    random_model.outputs.logits.write(logits)
    for top in (1, 22, MAX_TOP):
        expected, got = output_from_logits(logits, Want("top", top)), random_model.outputs.top.of(len(rows), top)
        np.testing.assert_array_equal(got.top_ids, expected.top_ids)
        np.testing.assert_array_equal(got.top_logits, expected.top_logits)
        np.testing.assert_allclose(got.logsumexp, expected.logsumexp, atol=LSE_BOUND, rtol=0)
