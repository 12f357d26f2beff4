"""The reference backend against itself: forms, trees, commits, snapshots. Its oracle is tests/test_oracle.py."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_cases import states_equal
from random_models import SMALL, random_tensors, random_tree, small_config
from warpsmith.backend.base import LOGITS, PREFILL_CHUNK, Want
from warpsmith.backend.reference import ReferenceBackend, ReferenceState, ops
from warpsmith.backend.tree import Tree
from warpsmith.errors import BadRequest

BACKENDS = {ratio: ReferenceBackend(small_config(ratio), random_tensors(small_config(ratio))) for ratio in (1, 2, 3)}
EVERY_ROW = Want("logits", every_row=True)


def plain_run(backend: ReferenceBackend, state: ReferenceState, tokens: np.ndarray) -> np.ndarray:
    rows = []
    for token in tokens:
        rows.append(backend.forward([(state, Tree.chain([token]))], LOGITS).logits.numpy())
        backend.commit(state, [0])
    return np.concatenate(rows)


@pytest.mark.parametrize("length", [1, 2, 17, 64])
def test_chunk_form_equals_the_recurrence(length: int) -> None:
    rng = np.random.default_rng(length)
    heads, dk, dv = 3, 16, 8
    q, k = (ops.l2_norm(rng.standard_normal((length, heads, dk))) for _ in range(2))
    v = rng.standard_normal((length, heads, dv))
    decay, beta = -rng.uniform(0, 3, (length, heads)), rng.uniform(0, 1, (length, heads))
    start = rng.standard_normal((heads, dk, dv))
    state, expected = start, []
    for t in range(length):
        state, output = ops.delta_step(state, q[t], k[t], v[t], decay[t], beta[t])
        expected.append(output)
    chunk_state, outputs = ops.delta_chunk(start, q, k, v, decay, beta)
    np.testing.assert_allclose(outputs, np.stack(expected), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(chunk_state, state, rtol=1e-11, atol=1e-12)


def test_chunk_form_survives_total_forgetting() -> None:
    """A decay of hundreds makes the fading factors underflow; nothing may overflow or become NaN."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((64, 2, 8)).astype(np.float32) for _ in range(3))
    decay = np.full((64, 2), -300, dtype=np.float32)
    state, outputs = ops.delta_chunk(np.ones((2, 8, 8), np.float32), q, k, v, decay, np.ones((64, 2), np.float32))
    assert np.isfinite(state).all()
    assert np.isfinite(outputs).all()


@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_float64_prefill_equals_float64_decoding(ratio: int) -> None:
    config = small_config(ratio)
    backend = ReferenceBackend(config, random_tensors(config, seed=ratio), np.float64)
    ids = np.random.default_rng(1).integers(0, config.vocab, 100)
    chunked, stepped = backend.new_state(100), backend.new_state(100)
    backend.prefill(chunked, ids)
    plain_run(backend, stepped, ids)
    for a, b in zip(chunked.layers.values(), stepped.layers.values(), strict=True):
        np.testing.assert_allclose(a.delta, b.delta, rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(a.keys, b.keys, rtol=1e-8, atol=1e-10)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32), ratio=st.sampled_from([1, 2, 3]), nodes=st.integers(1, 24), prompt=st.integers(0, 70)
)
def test_a_node_depends_only_on_its_ancestors(seed: int, ratio: int, nodes: int, prompt: int) -> None:
    """Every node's logits are bit-equal to a plain run of its path, and committing it gives the plain run's state."""
    backend, rng = BACKENDS[ratio], np.random.default_rng(seed)
    ids = rng.integers(0, SMALL.vocab, prompt)
    tree = random_tree(rng, nodes, SMALL.vocab)

    def fresh() -> ReferenceState:
        state = backend.new_state(prompt + nodes)
        if prompt:
            backend.prefill(state, ids)
        return state

    state = fresh()
    logits = backend.forward([(state, tree)], LOGITS).logits.numpy()
    assert logits is not None
    node = int(rng.integers(nodes))
    path = tree.path(node)
    plain = fresh()
    np.testing.assert_array_equal(logits[path], plain_run(backend, plain, tree.tokens[path]))
    backend.commit(state, path)
    assert states_equal(state, plain)


def test_splitting_at_chunk_boundaries_changes_no_bit() -> None:
    backend = BACKENDS[2]
    ids = np.random.default_rng(3).integers(0, SMALL.vocab, 200)
    whole = backend.prefill(backend.new_state(200), ids, EVERY_ROW).logits.numpy()
    state = backend.new_state(200)
    cut = 2 * PREFILL_CHUNK
    parts = [backend.prefill(state, part, EVERY_ROW).logits.numpy() for part in (ids[:cut], ids[cut:])]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_forward_leaves_the_state_alone_and_snapshots_restore_it() -> None:
    backend = BACKENDS[2]
    rng = np.random.default_rng(4)
    state, twin = backend.new_state(80), backend.new_state(80)
    ids = rng.integers(0, SMALL.vocab, 30)
    backend.prefill(state, ids)
    backend.prefill(twin, ids)
    saved = backend.snapshot(state)
    backend.forward([(state, random_tree(rng, 12, SMALL.vocab))])
    assert states_equal(state, twin)
    plain_run(backend, state, rng.integers(0, SMALL.vocab, 20))
    assert not states_equal(state, twin)
    backend.restore(state, saved)
    assert states_equal(state, twin)
    plain_run(backend, state, ids)  # a snapshot is a copy: using the state does not wear it out
    backend.restore(state, saved)
    assert states_equal(state, twin)


def test_decode_is_greedy_and_leaves_the_last_token_out() -> None:
    backend = BACKENDS[1]
    state, twin = backend.new_state(60), backend.new_state(60)
    first = int(backend.prefill(state, [1, 2, 3]).argmax[0])
    tokens = list(backend.decode(state, first, 20))
    assert state.length == 3 + 20
    backend.prefill(twin, [1, 2, 3])
    logits = plain_run(backend, twin, np.array([first, *tokens[:-1]]))
    assert tokens == logits.argmax(axis=1).tolist()
    again = backend.new_state(60)
    backend.prefill(again, [1, 2, 3])
    stop = tokens[7]
    assert list(backend.decode(again, first, 20, frozenset({stop}))) == tokens[: tokens.index(stop) + 1]


def test_want_says_what_comes_back() -> None:
    backend = BACKENDS[2]
    state = backend.new_state(20)
    last = backend.prefill(state, [5, 6, 7], Want("top", top=4))
    assert last.top_ids.shape == last.top_logits.shape == (1, 4)
    tree = Tree.chain([1, 2, 3])
    full = backend.forward([(state, tree)], LOGITS)
    top = backend.forward([(state, tree)], Want("top", top=4))
    np.testing.assert_array_equal(top.top_ids[:, 0], full.logits.numpy().argmax(axis=1))
    np.testing.assert_array_equal(top.top_logits, np.sort(full.logits.numpy(), axis=1)[:, ::-1][:, :4])
    expected = np.log(np.exp(full.logits.numpy().astype(np.float64)).sum(axis=1))
    np.testing.assert_allclose(top.logsumexp, expected, rtol=1e-5)
    nothing = backend.forward([(state, tree)], Want("none", features=(0, 2)))
    assert nothing.argmax is None
    assert nothing.features.numpy().shape == (3, 2 * SMALL.hidden)


def test_mtp_runs_its_chain_the_same_way_whole_or_in_steps() -> None:
    config = small_config(mtp_layers=1)
    backend = ReferenceBackend(config, random_tensors(config), np.float64)
    state = backend.new_state(40)
    hidden = np.random.default_rng(0).standard_normal((6, config.hidden)).astype(np.float32)
    want = Want("logits", hidden=True, every_row=True)
    whole = backend.mtp(state, range(6), hidden, 0, want)
    stepped = [backend.mtp(state, [i], hidden[i : i + 1], i, want).logits.numpy() for i in range(6)]
    np.testing.assert_allclose(np.concatenate(stepped), whole.logits.numpy(), rtol=1e-5, atol=1e-5)
    rewound = backend.mtp(state, [4, 5], hidden[4:], 4, want)
    np.testing.assert_allclose(rewound.logits.numpy(), whole.logits.numpy()[4:], rtol=1e-5, atol=1e-5)
    with pytest.raises(BadRequest, match="MTP"):
        BACKENDS[2].mtp(BACKENDS[2].new_state(4), [1], hidden[:1], 0)


def test_embeddings_and_head_are_lent_as_the_model_uses_them() -> None:
    backend = BACKENDS[2]
    state, tokens = backend.new_state(8), [3, 9, 3]
    np.testing.assert_array_equal(backend.embed(tokens), backend.trace(state, Tree.chain(tokens), "embed")["x"])
    run = backend.forward([(state, Tree.chain(tokens))], Want("logits", hidden=True))
    np.testing.assert_allclose(
        backend.head(run.hidden.numpy(), LOGITS).logits.numpy(), run.logits.numpy(), rtol=1e-4, atol=1e-5
    )


def test_trace_stops_where_asked() -> None:
    backend = BACKENDS[2]
    state, tree = backend.new_state(10), Tree.chain([1, 2])
    buffers = backend.trace(state, tree, "delta_in.0")
    assert buffers["qkv"].shape == (2, SMALL.conv_channels)
    assert "y" not in buffers
    full = backend.trace(state, tree, "head")
    np.testing.assert_array_equal(full["logits"], backend.forward([(state, tree)], LOGITS).logits.numpy())
    with pytest.raises(BadRequest, match=r"delta_in\.9"):
        backend.trace(state, tree, "delta_in.9")


def test_misuse_is_refused() -> None:
    backend = BACKENDS[2]
    state = backend.new_state(4)
    with pytest.raises(BadRequest, match="context"):
        backend.prefill(state, range(5))
    with pytest.raises(BadRequest, match="Token ids"):
        backend.prefill(state, [SMALL.vocab])
    with pytest.raises(BadRequest, match="nothing"):
        backend.prefill(state, [])
    with pytest.raises(BadRequest, match="commit"):
        backend.commit(state, [0])
    backend.forward([(state, Tree(np.array([1, 2, 3]), np.array([-1, 0, 0])))])
    with pytest.raises(BadRequest, match="path"):
        backend.commit(state, [0, 1, 2])
    assert state.length == 0


@pytest.mark.parametrize(
    "parents",
    [[], [0], [-1, -1], [-1, 1], [-1, 0, 2], [-1] + [0] * 64],
    ids=["empty", "no root", "two roots", "own parent", "later parent", "too many"],
)
def test_malformed_trees_are_refused(parents: list[int]) -> None:
    with pytest.raises(BadRequest):
        Tree(np.zeros(len(parents), int), np.array(parents))


def test_a_root_is_a_chain_of_one() -> None:
    root, chain = Tree.root(7), Tree.chain([7])
    for name in ("tokens", "parents", "_depths", "height", "child"):
        assert np.array_equal(getattr(root, name), getattr(chain, name)), name
    assert (len(root), root.path(0), root.tokens.dtype, root.parents.dtype) == (1, [0], np.int32, np.int32)


def test_children_of_equal_tokens_are_the_first() -> None:
    tree = Tree(np.array([9, 4, 4, 5]), np.array([-1, 0, 0, 0]))
    assert tree.child == {(-1, 9): 0, (0, 4): 1, (0, 5): 3}
