"""The activations-first forward pass on a GPU: against the reference, and row-invariant to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from device_checks import check_interleaved, plain_run, relative, same_state
from large_cases import BOUND, MIXED, SHAPE, tensors_of
from random_models import random_tree
from warpsmith.backend.base import LOGITS, Want
from warpsmith.backend.cuda.large.backend import LargeBackend
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.backend.tree import Tree
from warpsmith.errors import NoDevice

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def on_gpu() -> tuple[LargeBackend, ReferenceBackend]:
    tensors = tensors_of(SHAPE, MIXED)
    try:
        cuda = LargeBackend(SHAPE, tensors, options={"WATCHDOG_CYCLES": "2000000000ll"})
    except NoDevice as error:
        pytest.skip(str(error))
    return cuda, ReferenceBackend(SHAPE, tensors)


def test_features_and_logits_are_those_of_the_reference(on_gpu: tuple[LargeBackend, ReferenceBackend]) -> None:
    cuda, reference = on_gpu
    state, expected, rng = cuda.new_state(512), reference.new_state(512), np.random.default_rng(0)
    want = Want("logits", features=(0, 1, 2), hidden=True)
    for nodes in (1, 5, 8, 13, 16, 22, 24, 1, 24, 24, 24, 24, 24, 24):  # past 128 tokens: chunks that all nodes share
        tree = random_tree(rng, nodes, SHAPE.vocab)
        got, exact = cuda.forward([(state, tree)], want), reference.forward([(expected, tree)], want)
        assert relative(got.features.numpy(), exact.features.numpy()) < BOUND
        assert relative(got.logits.numpy(), exact.logits.numpy()) < BOUND
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


def test_sequences_interleave(on_gpu: tuple[LargeBackend, ReferenceBackend]) -> None:
    check_interleaved(on_gpu[0], [5, 9, 8], 30)
