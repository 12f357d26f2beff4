"""Row invariance of the CPU engine, to the bit: any tree, any number of threads, any cut of a prompt."""

import dataclasses
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from random_models import random_tensors, random_tree, small_config
from warpsmith.backend.base import LOGITS, Want
from warpsmith.backend.cpu import CpuBackend, CpuState
from warpsmith.backend.tree import Tree
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.model.config import SIZES
from warpsmith.model.synthetic import random_checkpoint

TINY = dataclasses.replace(SIZES["tiny"], vocab=300, layers=4)
EVERY = Want("logits", every_row=True)


@cache
def recipe_tensors(recipe: str) -> dict[str, Tensor]:
    return random_checkpoint(TINY, seed=1, recipe=recipe).tensors


@cache
def backend(
    recipe: str, threads: int = 2, portable: bool = False, cache: tuple[str, str] = ("f16", "f16")
) -> CpuBackend:
    options = {"cpu_features": ["portable"] if portable else None, "cache_type_k": cache[0], "cache_type_v": cache[1]}
    if recipe == "small":  # short heads, three value heads a key head
        config = small_config(3)
        return CpuBackend(config, random_tensors(config), threads=threads, **options)
    return CpuBackend(TINY, recipe_tensors(recipe), threads=threads, **options)


def started(cpu: CpuBackend, length: int, context: int = 1200) -> CpuState:
    state = cpu.new_state(context)
    if length:
        cpu.prefill(state, np.random.default_rng(length).integers(0, cpu.config.vocab, length), Want("none"))
    return state


def step(cpu: CpuBackend, state: CpuState, token: int) -> np.ndarray:
    logits = cpu.forward([(state, Tree.chain([token]))], LOGITS).logits.numpy()
    cpu.commit(state, [0])
    return logits[0]


def check_tree(cpu: CpuBackend, length: int, tree: Tree) -> None:
    """Every node's logits equal those of decoding its path one token at a time; so does what a commit leaves."""
    state = started(cpu, length)
    logits = cpu.forward([(state, tree)], LOGITS).logits.numpy()
    saved = cpu.snapshot(state)
    deepest = int(tree.depths().argmax())
    leaves = sorted(set(range(len(tree))) - set(tree.parents.tolist()))
    other = cpu.new_state(state.context)
    for leaf in leaves:
        cpu.restore(other, saved)
        for node in tree.path(leaf):
            assert (step(cpu, other, int(tree.tokens[node])) == logits[node]).all()
        if leaf == deepest:
            cpu.commit(state, tree.path(leaf))
            assert (cpu.snapshot(state).data == cpu.snapshot(other).data).all()


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 1 << 20), nodes=st.integers(1, 64), length=st.integers(0, 40))
@pytest.mark.parametrize("recipe", ["small", "q4_k_m"])
def test_a_node_depends_on_its_ancestors_alone(recipe: str, seed: int, nodes: int, length: int) -> None:
    cpu = backend(recipe)
    check_tree(cpu, length, random_tree(np.random.default_rng(seed), nodes, cpu.config.vocab))


@pytest.mark.parametrize("recipe", ["f16", "bf16", "q8_0", "q4_0"])
def test_so_it_is_for_every_weight_type(recipe: str) -> None:
    for portable in (False, True):
        cpu = backend(recipe, portable=portable)
        check_tree(cpu, 21, random_tree(np.random.default_rng(7), 23, cpu.config.vocab))


@pytest.mark.parametrize("cache", [("f32", "f32"), ("q8_0", "q8_0"), ("q8_0", "f16")])
def test_so_it_is_for_every_type_of_keys_and_values(cache: tuple[str, str]) -> None:
    cpu = backend("small", cache=cache)
    check_tree(cpu, 21, random_tree(np.random.default_rng(7), 23, cpu.config.vocab))


@pytest.mark.parametrize("length", [505, 1030])
def test_so_it_is_across_segments_of_keys(length: int) -> None:
    cpu = backend("small", threads=4)  # four threads: one node's keys are split among them, many nodes' are not
    check_tree(cpu, length, Tree.chain(list(range(20))))
    check_tree(cpu, length, random_tree(np.random.default_rng(7), 50, cpu.config.vocab))


def test_a_star_and_a_chain_of_64_nodes() -> None:
    cpu = backend("small")
    check_tree(cpu, 3, Tree.chain(list(range(64))))
    check_tree(cpu, 3, Tree(np.arange(64), np.array([-1] + [0] * 63)))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(["prefill", "step", "path", "look", "snapshot"]), min_size=1, max_size=12))
def test_what_a_state_has_been_through_does_not_show(actions: list[str]) -> None:
    """Updates that a state is owed are added once, whatever reads it next."""
    cpu = backend("small")
    state, ids = started(cpu, 5), [*np.random.default_rng(5).integers(0, cpu.config.vocab, 5).tolist()]
    tree = Tree(np.array([7, 8, 9, 10]), np.array([-1, 0, 0, 2]))
    for action in actions:
        if action == "prefill":
            cpu.prefill(state, [3, 4], Want("none"))
            ids += [3, 4]
        elif action == "step":
            step(cpu, state, 6)
            ids += [6]
        elif action == "snapshot":
            saved, state = cpu.snapshot(state), cpu.new_state(state.context)
            cpu.restore(state, saved)
        else:
            cpu.forward([(state, tree)], Want("none"))
            if action == "path":
                cpu.commit(state, [0, 2, 3])
                ids += [7, 9, 10]
    plain = cpu.new_state(state.context)
    cpu.prefill(plain, ids, Want("none"))
    assert (cpu.snapshot(state).data == cpu.snapshot(plain).data).all()


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("recipe", ["small", "q4_k_m", "bf16"])
def test_prefill_is_decoding_and_can_be_cut_anywhere(recipe: str, portable: bool) -> None:
    cpu = backend(recipe, portable=portable)
    ids = np.random.default_rng(5).integers(0, cpu.config.vocab, 150)
    whole = cpu.new_state(150)
    logits = cpu.prefill(whole, ids, EVERY).logits.numpy()
    for cuts in ([64], [128], [1, 2, 67], [100]):
        state = cpu.new_state(150)
        pieces = [cpu.prefill(state, piece, EVERY).logits.numpy() for piece in np.split(ids, cuts)]
        assert (np.concatenate(pieces) == logits).all()
        assert (cpu.snapshot(state).data == cpu.snapshot(whole).data).all()
    state = cpu.new_state(150)
    assert all((step(cpu, state, int(token)) == row).all() for token, row in zip(ids[:40], logits, strict=False))


@pytest.mark.parametrize("recipe", ["small", "q4_k_m", "bf16"])
def test_threads_change_nothing(recipe: str) -> None:
    results = []
    for threads in (1, 2, 3, 4):
        cpu = backend(recipe, threads=threads)
        rng = np.random.default_rng(6)
        state = cpu.new_state(900)
        prompt = cpu.prefill(state, rng.integers(0, cpu.config.vocab, 700), EVERY)
        tree = random_tree(rng, 30, cpu.config.vocab)
        output = cpu.forward([(state, tree)], Want("top", top=9, hidden=True))
        cpu.commit(state, tree.path(29))
        results.append((prompt.logits.numpy(), output.hidden.numpy(), output.top_ids, output.top_logits,
                        output.logsumexp, cpu.snapshot(state).data))  # fmt: skip
    for other in results[1:]:
        for expected, found in zip(results[0], other, strict=True):
            assert (expected == found).all()


def test_decode_is_the_plain_loop_and_commits_all_but_the_last() -> None:
    cpu = backend("q4_k_m")
    state, plain = started(cpu, 10), started(cpu, 10)
    tokens = list(cpu.decode(state, 5, 12))
    expected, token = [], 5
    for _ in range(12):
        token = int(step(cpu, plain, token).argmax())
        expected.append(token)
    assert tokens == expected
    assert state.length == plain.length == 22
    assert (cpu.snapshot(state).data == cpu.snapshot(plain).data).all()
    stopped = started(cpu, 10)
    stop = expected[3]
    assert list(cpu.decode(stopped, 5, 12, frozenset([stop]))) == expected[: expected.index(stop) + 1]
    abandoned = started(cpu, 10)
    next(cpu.decode(abandoned, 5, 12))
    assert abandoned.length == 11
