"""The CUDA backend and its kernels without a GPU: on an emulated one (see emulator/), at the size of a toy."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator

import numpy as np
import pytest

from device_checks import (
    check_drawn,
    check_interleaved,
    check_smaller_than_its_room,
    check_verified,
    relative,
    same_state,
)
from emulated_cases import BOUND, SHAPE, Case, backends, check_a_tree, ids, tensors_of
from emulator.gpu import emulated_gpu
from random_models import random_tree
from warpsmith.backend.base import LOGITS, Want
from warpsmith.backend.cuda.build.profiles import load_profiles
from warpsmith.backend.cuda.weights_first import WeightsFirstBackend
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.backend.sampling import Sampling
from warpsmith.backend.tree import Tree
from warpsmith.errors import BadRequest
from warpsmith.model.plan import forward_plan

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

STAGES = [s.name for s in forward_plan(SHAPE) if s.op not in ("final_norm", "head")]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[WeightsFirstBackend, ReferenceBackend]]:
    with backends(Case((1, 8, 24), often=True)) as both:
        yield both


@pytest.mark.parametrize("nodes", [1, 11])
def test_every_stage_matches_the_reference(pair, nodes: int) -> None:
    cuda, reference = pair
    tree = random_tree(np.random.default_rng(nodes), nodes, SHAPE.vocab)
    states = [backend.new_state(64) for backend in pair]
    for backend, state in zip(pair, states, strict=True):
        backend.prefill(state, ids(0, 11))
    for stage in STAGES:
        expected = reference.trace(states[1], tree, stage)
        for name, got in cuda.trace(states[0], tree, stage).items():
            assert relative(got, expected[name]) < BOUND, (stage, name)


def test_a_stage_that_is_not_in_the_plan_is_refused(pair) -> None:
    cuda, _ = pair
    for stage in ("head", "attention_mix.0", "mlp_in.3", "nothing"):
        with pytest.raises(BadRequest, match="no stage"):
            cuda.trace(cuda.new_state(8), Tree.chain([1]), stage)


@pytest.mark.parametrize(("length", "nodes"), [(0, 11), (13, 8), (16, 13), (21, 22)])
def test_a_node_depends_only_on_its_ancestors(pair, length: int, nodes: int) -> None:
    """Wherever the tree lies among the chunks of keys."""
    check_a_tree(pair, length, nodes)


@pytest.mark.parametrize("nodes", [1, 4, 6])
def test_a_tree_on_the_device_may_be_smaller_than_its_room(pair, nodes: int) -> None:
    """Two warps publish its nodes, four at a time: of a small tree one of them has none."""
    check_smaller_than_its_room(pair[0], nodes, 24)


def test_decoding_in_one_launch_equals_stepping(pair) -> None:
    cuda, _ = pair
    state, twin = cuda.new_state(64), cuda.new_state(64)
    token = int(cuda.prefill(state, ids(4, 14)).argmax[-1])
    cuda.prefill(twin, ids(4, 14))
    tokens = list(cuda.decode(state, token, 5))
    step, expected = token, []
    for _ in range(5):
        step = int(cuda.forward([(twin, Tree.chain([step]))]).argmax[0])
        cuda.commit(twin, [0])
        expected.append(step)
    assert tokens == expected
    assert same_state(SHAPE, state, twin)


def test_tokens_are_drawn_as_the_sampler_draws_them(pair) -> None:
    check_drawn(pair[0], Sampling(temperature=0.9, top_k=20, top_p=0.95, repeat_penalty=1.2, seed=7), 5)


def test_features_and_hidden(pair) -> None:
    want = Want("argmax", features=(2, 0), hidden=True)
    got, expected = (backend.prefill(backend.new_state(64), ids(5, 8), want) for backend in pair)
    assert relative(got.features.numpy(), expected.features.numpy()) < BOUND
    assert relative(got.hidden.numpy(), expected.hidden.numpy()) < BOUND


def test_sequences_interleave(pair) -> None:
    check_interleaved(pair[0], [5, 3], decoded=4)


def test_a_sampled_tree_is_verified_without_its_logits(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    check_verified(pair[0], Sampling(temperature=0.9, top_k=20, presence_penalty=0.5, seed=7), 0, monkeypatch)
    check_verified(pair[0], Sampling(temperature=0.5, seed=9), 3, monkeypatch)


def test_memory_is_given_back_with_the_backend_and_its_states() -> None:
    small = dataclasses.replace(load_profiles()["h200"], largest_tree=1)
    with emulated_gpu(3, (1,)) as driver:
        backend = WeightsFirstBackend(SHAPE, tensors_of(SHAPE), profile=small)
        state = backend.new_state(16)
        list(backend.decode(state, 3, 2))
        output = backend.forward([(state, Tree.chain([5]))], LOGITS)
        assert driver.memory
        del backend, state, output
        assert not driver.memory
