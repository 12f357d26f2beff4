"""The activations-first forward pass on a GPU: against the reference, and row-invariant to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from device_checks import (
    check_drawn,
    check_interleaved,
    check_last_path,
    check_verified,
    distance,
    plain_run,
    relative,
    same_state,
)
from large_cases import CACHES, MIXED, SHAPE, bound_of, remember, rounded_caches, tensors_of
from random_models import random_tree
from warpsmith.backend.base import LOGITS, Want
from warpsmith.backend.cuda.large.backend import LargeBackend
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.backend.sampling import Sampling
from warpsmith.backend.tree import Tree

pytestmark = pytest.mark.gpu
LONG, WATCHDOG = 16448, {"WATCHDOG_CYCLES": "2000000000ll"}


@pytest.fixture(scope="module", params=CACHES, ids="-".join)
def on_gpu(request: pytest.FixtureRequest) -> Iterator[tuple[LargeBackend, ReferenceBackend]]:
    tensors, (keys, values) = tensors_of(SHAPE, MIXED), request.param
    cuda = LargeBackend(SHAPE, tensors, context=LONG, cache_type_k=keys, cache_type_v=values, options=WATCHDOG)
    with rounded_caches(request.param):
        yield cuda, ReferenceBackend(SHAPE, tensors)


def test_features_and_logits_are_those_of_the_reference(on_gpu: tuple[LargeBackend, ReferenceBackend]) -> None:
    cuda, reference = on_gpu
    state, expected, rng = cuda.new_state(512), reference.new_state(512), np.random.default_rng(0)
    want = Want("logits", features=(0, 1, 2), hidden=True)
    for nodes in (1, 5, 8, 13, 16, 22, 24, 1, 24, 24, 24, 24, 24, 24):  # past 128 tokens: chunks that all nodes share
        tree = random_tree(rng, nodes, SHAPE.vocab)
        got, exact = cuda.forward([(state, tree)], want), reference.forward([(expected, tree)], want)
        assert relative(got.features.numpy(), exact.features.numpy()) < bound_of(cuda)
        assert relative(got.logits.numpy(), exact.logits.numpy()) < bound_of(cuda)
        for backend, each in ((cuda, state), (reference, expected)):
            backend.commit(each, tree.path(nodes - 1))


def test_rows_do_not_depend_on_the_tree_around_them(on_gpu: tuple[LargeBackend, ReferenceBackend]) -> None:
    cuda, _ = on_gpu
    rng = np.random.default_rng(2)
    text = rng.integers(0, SHAPE.vocab, 200)
    plain, state, at = cuda.new_state(512), cuda.new_state(512), 0
    expected = plain_run(cuda, plain, text)
    while at < len(text):
        count = int(min(len(text) - at, rng.integers(1, 13)))
        tokens, parents, main = [int(text[at])], [-1], [0]
        while len(main) < count or len(tokens) < count + 8:
            if len(main) < count and rng.random() < 0.5:
                parents.append(main[-1])
                main.append(len(tokens))
                tokens.append(int(text[at + len(main) - 1]))
            elif len(tokens) < 24 - (count - len(main)):
                parents.append(int(rng.integers(0, len(tokens))))
                tokens.append(int(rng.integers(0, SHAPE.vocab)))
            elif len(main) == count:
                break
        output = cuda.forward([(state, Tree(np.array(tokens), np.array(parents)))], LOGITS)
        np.testing.assert_array_equal(output.logits.numpy()[main], expected[at : at + count])
        cuda.commit(state, main)
        at += count
    assert same_state(SHAPE, state, plain)


@pytest.mark.parametrize("context", [512, 8320])
def test_trees_in_a_short_context_have_the_bits_of_plain_decoding(context: int) -> None:
    """Their builds have other room for values and sums, and one team of warps for both; or one node's has alone."""
    cuda = LargeBackend(SHAPE, tensors_of(SHAPE, MIXED), context=context, options=WATCHDOG)
    state, plain, rng = cuda.new_state(512), cuda.new_state(512), np.random.default_rng(5)
    for nodes in (13, 16, 22, 24, 64, 3, 24):
        check_last_path(cuda, state, plain, random_tree(rng, nodes, SHAPE.vocab))


def test_sequences_interleave(on_gpu: tuple[LargeBackend, ReferenceBackend]) -> None:
    check_interleaved(on_gpu[0], [5, 9, 8], 30)


@pytest.mark.parametrize("nodes", [8, 13, 22, 24])
def test_a_long_past_is_attended_to_as_the_reference_does(
    on_gpu: tuple[LargeBackend, ReferenceBackend], nodes: int
) -> None:
    """Chunks that all nodes share, on their way while others are at work: several for every split. (One node by itself
    has the bits it has in a tree: the next test.)"""
    cuda, reference = on_gpu
    rng = np.random.default_rng(nodes)
    for length in (127, 1000, 8200):
        state, expected = cuda.new_state(length + 64), reference.new_state(length + 64)
        remember(cuda, state, reference, expected, length, rng)
        tree = random_tree(rng, nodes, SHAPE.vocab)
        got, exact = (each.forward([(s, tree)], LOGITS) for each, s in ((cuda, state), (reference, expected)))
        assert distance(got.logits.numpy(), exact.logits.numpy()) < bound_of(cuda)


def test_rows_do_not_depend_on_the_tree_at_any_length(on_gpu: tuple[LargeBackend, ReferenceBackend]) -> None:
    cuda, reference = on_gpu
    rng = np.random.default_rng(5)
    for length in (60, 126, 1021, 8189):
        tree = random_tree(rng, 24, SHAPE.vocab)
        state, plain = cuda.new_state(length + 64), cuda.new_state(length + 64)
        for each in (state, plain):
            past = reference.new_state(length + 64)
            remember(cuda, each, reference, past, length, np.random.default_rng(length))
        for leaf in (23, 22, 11):
            path = tree.path(leaf)
            rows = cuda.forward([(state, tree)], LOGITS).logits.numpy()[path]
            kept = cuda.snapshot(plain)
            np.testing.assert_array_equal(rows, plain_run(cuda, plain, tree.tokens[path]))
            if leaf != 11:
                cuda.restore(plain, kept)
        cuda.forward([(state, tree)])
        cuda.commit(state, tree.path(11))
        assert same_state(SHAPE, state, plain)


@pytest.mark.parametrize("nodes", [25, 40, 64])
def test_rows_do_not_depend_on_how_many_launches_a_tree_takes(
    on_gpu: tuple[LargeBackend, ReferenceBackend], nodes: int
) -> None:
    cuda, reference = on_gpu
    rng = np.random.default_rng(nodes)
    for length, reach in ((60, 64), (1021, 4)):
        parents = [-1, *(int(rng.integers(max(0, i - reach), i)) for i in range(1, nodes))]
        tree = Tree(rng.integers(0, SHAPE.vocab, nodes), np.array(parents))
        state, plain = cuda.new_state(length + 128), cuda.new_state(length + 128)
        for each in (state, plain):
            past = reference.new_state(length + 128)
            remember(cuda, each, reference, past, length, np.random.default_rng(length))
        rows, kept = cuda.forward([(state, tree)], LOGITS).logits.numpy(), cuda.snapshot(plain)
        for leaf in range(nodes):
            if leaf not in parents:
                cuda.restore(plain, kept)
                path = tree.path(leaf)
                np.testing.assert_array_equal(rows[path], plain_run(cuda, plain, tree.tokens[path]))
        cuda.commit(state, path)
        assert same_state(SHAPE, state, plain)


DRAWS = [
    Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=1),
    Sampling(temperature=1.0, top_k=20, top_p=0.95, presence_penalty=1.5, repeat_penalty=1.1, seed=2),
    Sampling(temperature=0.6, top_p=0.9, seed=3),
    Sampling(temperature=1.0, min_p=0.05, logit_bias={5: 2.0, 300: -100.0}, seed=4),
    Sampling(repeat_penalty=1.2, frequency_penalty=0.3),
]


@pytest.mark.parametrize("how", DRAWS, ids=str)
def test_tokens_are_drawn_as_the_sampler_draws_them(
    on_gpu: tuple[LargeBackend, ReferenceBackend], how: Sampling
) -> None:
    check_drawn(on_gpu[0], how, 100)


def test_a_sampled_tree_is_verified_without_its_logits(
    on_gpu: tuple[LargeBackend, ReferenceBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_verified(on_gpu[0], Sampling(temperature=0.9, top_k=20, presence_penalty=0.5, seed=7), 0, monkeypatch)


def test_two_thousand_decoded_tokens_do_not_drift(on_gpu: tuple[LargeBackend, ReferenceBackend]) -> None:
    """Their state has the bits that passes of one token leave, and is as near to the reference as after one token."""
    cuda, reference = on_gpu
    how, count = Sampling(temperature=1.0, top_k=40, seed=3), 2000
    state, plain, expected = (backend.new_state(count + 8) for backend in (cuda, cuda, reference))
    text = [7, *cuda.decode(state, 7, count, sampling=how, history=[7])]
    assert len(set(text)) > SHAPE.vocab // 2  # no loop of a few tokens, which would hide an error
    for token in text[:-1]:
        cuda.forward([(plain, Tree.chain([token]))])
        cuda.commit(plain, [0])
    assert same_state(SHAPE, state, plain)
    reference.prefill(expected, text[:-1])
    tree, want = Tree.chain(text[-1:]), Want("logits", features=(0, 1, 2))
    got, exact = cuda.forward([(state, tree)], want), reference.forward([(expected, tree)], want)
    assert relative(got.features.numpy(), exact.features.numpy()) < bound_of(cuda)
    assert relative(got.logits.numpy(), exact.logits.numpy()) < bound_of(cuda)
