"""DDTree: the best tree of n nodes, checked against every tree there is."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warpsmith.backend.base import Want, output_from_logits
from warpsmith.backend.tree import Tree
from warpsmith.draft.base import ScoredTree
from warpsmith.draft.ddtree import best_chain, best_tree, marginals

ROOT = 7


def random_marginals(seed: int, depth: int, width: int, coarse: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities, best first; coarse ones are multiples of 1/4, so that many paths are equally likely."""
    rng = np.random.default_rng(seed)
    log_probs = -np.sort(rng.exponential(1.0, (depth, width)), axis=1)
    if coarse:
        log_probs = np.ceil(log_probs * 4) / 4
    ids = np.stack([rng.permutation(50)[:width] for _ in range(depth)])
    return ids, log_probs


def paths_of(tree: ScoredTree) -> list[tuple[int, ...]]:
    return [tuple(tree.tokens[tree.path(node)].tolist()) for node in range(len(tree))]


def value(tree: ScoredTree) -> float:
    """The number of nodes that are expected to be right."""
    return float(np.exp(tree.scores[1:]).sum())


def all_prefix_closed_sets(depth: int, width: int, nodes: int) -> list[tuple[tuple[int, ...], ...]]:
    paths = [p for d in range(1, depth + 1) for p in product(range(width), repeat=d)]
    return [
        chosen
        for chosen in combinations(paths, nodes)
        if all(p[:-1] == () or p[:-1] in chosen for p in chosen)
    ]  # fmt: skip


@pytest.mark.parametrize(("depth", "width"), [(1, 5), (2, 3), (3, 2)])
@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("coarse", [False, True])
def test_no_tree_of_as_many_nodes_is_better(depth: int, width: int, nodes: int, coarse: bool) -> None:
    candidates = all_prefix_closed_sets(depth, width, nodes)
    for seed in range(8):
        ids, log_probs = random_marginals(seed, depth, width, coarse)
        best = max(sum(np.exp(sum(log_probs[d, r] for d, r in enumerate(p))) for p in c) for c in candidates)
        tree = best_tree(ROOT, ids, log_probs, nodes)
        assert len(tree) == nodes + 1
        assert value(tree) == pytest.approx(best, rel=1e-12)


shapes = st.tuples(st.integers(0, 10_000), st.integers(1, 15), st.integers(1, 16), st.integers(1, 63), st.booleans())


@settings(max_examples=60, deadline=None)
@given(shapes, st.booleans())
def test_any_tree_is_a_tree_of_paths(shape: tuple[int, int, int, int, bool], chain_seed: bool) -> None:
    seed, depth, width, nodes, coarse = shape
    ids, log_probs = random_marginals(seed, depth, width, coarse)
    tree = best_tree(ROOT, ids, log_probs, nodes, chain_seed=chain_seed)
    assert tree.tokens[0] == ROOT
    assert (tree.parents[1:] < np.arange(1, len(tree))).all(), "parents precede their children"
    assert len(tree) == 1 + min(nodes, sum(width**d for d in range(1, depth + 1)))
    assert tree.depths().max() <= depth
    paths = paths_of(tree)
    assert len(set(paths)) == len(paths), "no path twice"
    assert {p[:-1] for p in paths[1:]} <= set(paths), "every path's beginning is there"
    for node, path in enumerate(paths):
        ranks = [int(np.flatnonzero(ids[d] == token)[0]) for d, token in enumerate(path[1:])]
        assert tree.scores[node] == pytest.approx(sum(log_probs[d, r] for d, r in enumerate(ranks)))
    if not chain_seed:
        assert (np.diff(tree.scores[1:]) <= 1e-12).all(), "likeliest first"


@settings(max_examples=40, deadline=None)
@given(shapes, st.integers(1, 63), st.booleans())
def test_a_smaller_budget_is_the_beginning_of_a_larger(
    shape: tuple[int, int, int, int, bool], fewer: int, chain_seed: bool
) -> None:
    seed, depth, width, nodes, coarse = shape
    fewer = min(fewer, nodes)
    ids, log_probs = random_marginals(seed, depth, width, coarse)
    large = best_tree(ROOT, ids, log_probs, nodes, chain_seed=chain_seed)
    small = best_tree(ROOT, ids, log_probs, fewer, chain_seed=chain_seed)
    cut = large.first(fewer)
    for name in ("tokens", "parents", "scores"):
        assert np.array_equal(getattr(small, name), getattr(cut, name))


def test_equal_paths_are_taken_in_the_order_of_their_ranks() -> None:
    ids = np.array([[10, 11, 12], [20, 21, 22]])
    flat = np.log(np.full((2, 3), 0.3))
    tree = best_tree(ROOT, ids, flat, 7)
    assert [p[1:] for p in paths_of(tree)][1:] == [(10,), (11,), (12,), (10, 20), (10, 21), (10, 22), (11, 20)]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 15), st.integers(1, 63))
def test_one_choice_at_each_depth_makes_a_chain(seed: int, depth: int, nodes: int) -> None:
    ids, log_probs = random_marginals(seed, depth, 6)
    chain = best_chain(ROOT, ids, log_probs, nodes)
    expected = Tree.chain([ROOT, *ids[:nodes, 0].tolist()])
    assert np.array_equal(chain.tokens, expected.tokens)
    assert np.array_equal(chain.parents, expected.parents)
    narrow = best_tree(ROOT, ids[:, :1], log_probs[:, :1], nodes)
    assert np.array_equal(narrow.tokens, chain.tokens)
    seeded = best_tree(ROOT, ids, log_probs, min(nodes, depth), chain_seed=True)
    assert np.array_equal(seeded.tokens, chain.tokens), "a budget of the depth leaves room for the seed only"


def test_a_chain_seed_keeps_the_depth_that_flat_probabilities_lose() -> None:
    ids, log_probs = random_marginals(0, 8, 8)
    log_probs = log_probs * 0.01 - 2.0
    assert best_tree(ROOT, ids, log_probs, 12).depths().max() <= 2
    seeded = best_tree(ROOT, ids, log_probs, 12, chain_seed=True)
    assert seeded.depths().max() == 8
    assert len(seeded) == 13


def test_what_cannot_be_right_is_left_out() -> None:
    ids = np.array([[1, 2], [3, 4]])
    log_probs = np.array([[-0.1, -np.inf], [np.nan, np.nan]])
    for chain_seed in (False, True):
        assert best_tree(ROOT, ids, log_probs, 10, chain_seed=chain_seed).tokens.tolist() == [ROOT, 1]


def test_marginals_are_over_the_whole_vocabulary() -> None:
    logits = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32) * 4
    ids, log_probs = marginals(output_from_logits(logits, Want(tokens="top", top=5)))
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    assert log_probs == pytest.approx(np.take_along_axis(exact, ids, axis=1), abs=1e-5)
    assert (np.exp(log_probs).sum(axis=1) < 1).all()


def test_conditionals_multiply_to_the_scores() -> None:
    ids, log_probs = random_marginals(3, 4, 4)
    tree = best_tree(ROOT, ids, log_probs, 20)
    conditionals = tree.conditionals()
    for node in range(len(tree)):
        assert np.log(conditionals[tree.path(node)]).sum() == pytest.approx(tree.scores[node])
