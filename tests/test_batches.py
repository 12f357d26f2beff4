"""Several sequences on one backend: in one forward, interleaved, and each as if it were alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_cases import BACKEND, SAMPLED, VOCAB, backend_of, plain, prompt_of, states_equal
from random_models import random_tree
from warpsmith.backend.base import LOGITS, Backend, Output, State, Want, wanted_for
from warpsmith.backend.sampling import Sampling
from warpsmith.backend.tree import MAX_NODES, Tree
from warpsmith.errors import BadRequest

EVERYTHING = Want("logits", features=(3, 0), hidden=True)
backends = pytest.mark.parametrize("name", ["reference", "cpu"])


def started(on: Backend, length: int, seed: int) -> State:
    state = on.new_state(600)
    if length:
        on.prefill(state, prompt_of(length, seed), Want("none"))
    return state


def check_same(together: Output, alone: Output) -> None:
    """To the bit."""
    assert np.array_equal(together.argmax, alone.argmax)
    for name in ("logits", "features", "hidden"):
        assert np.array_equal(getattr(together, name).numpy(), getattr(alone, name).numpy()), name


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(length, nodes) of 1 to 8 sequences, 64 nodes at most in all."""
    count = draw(st.integers(1, 8))
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 5, 15, 16, 17, 64, 90]), min_size=count, max_size=count))
    left, nodes = MAX_NODES - count, []
    for _ in range(count):
        nodes.append(1 + draw(st.integers(0, min(left, 20))))
        left -= nodes[-1] - 1
    return list(zip(lengths, nodes, strict=True))


def check_batch(on: Backend, sizes: list[tuple[int, int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, nodes, VOCAB) for _, nodes in sizes]
    states = [started(on, length, i) for i, (length, _) in enumerate(sizes)]
    paths = [tree.path(int(rng.integers(len(tree)))) for tree in trees]
    alone = [started(on, length, i) for i, (length, _) in enumerate(sizes)]
    expected = [on.forward([(state, tree)], EVERYTHING) for state, tree in zip(alone, trees, strict=True)]
    for order in (range(len(sizes)), rng.permutation(len(sizes)).tolist()):
        output, start = on.forward([(states[i], trees[i]) for i in order], EVERYTHING), 0
        for i in order:
            check_same(output[start : start + len(trees[i])], expected[i])
            start += len(trees[i])
        assert start == len(output.argmax)  # type: ignore[arg-type]
    for i in rng.permutation(len(sizes)).tolist():  # any order of commits
        on.commit(states[i], paths[i])
    for i in rng.permutation(len(sizes)).tolist():
        on.commit(alone[i], paths[i])
    assert all(states_equal(a, b) for a, b in zip(states, alone, strict=True))


@settings(max_examples=6, deadline=None)
@given(sizes=batches(), seed=st.integers(0, 1 << 20))
def test_a_node_knows_nothing_of_other_sequences_on_the_reference(sizes: list[tuple[int, int]], seed: int) -> None:
    check_batch(BACKEND, sizes, seed)


@settings(max_examples=25, deadline=None)
@given(sizes=batches(), seed=st.integers(0, 1 << 20))
def test_a_node_knows_nothing_of_other_sequences_on_the_cpu(sizes: list[tuple[int, int]], seed: int) -> None:
    check_batch(backend_of("cpu"), sizes, seed)


@settings(max_examples=10, deadline=None)
@given(lengths=st.lists(st.sampled_from([0, 1, 2, 3, 15, 16, 90]), min_size=1, max_size=8), steps=st.integers(1, 5))
def test_a_token_more_for_each_is_a_forward_and_a_commit_of_each(lengths: list[int], steps: int) -> None:
    """In one call and in parts, also after commits of paths and before them."""
    on, rng = backend_of("cpu"), np.random.default_rng(steps)
    assert on.advances
    one, other = ([started(on, length, i) for i, length in enumerate(lengths)] for _ in range(2))
    for _ in range(steps):
        tokens = rng.integers(0, VOCAB, len(lengths)).tolist()
        check_same(
            on.advance(list(zip(one, tokens, strict=True)), EVERYTHING),
            Backend.advance(on, list(zip(other, tokens, strict=True)), EVERYTHING),
        )
        assert all(states_equal(a, b) for a, b in zip(one, other, strict=True))
        tree = random_tree(rng, 6, VOCAB)
        for states in (one, other):
            on.forward([(states[0], tree)])
            on.commit(states[0], tree.path(5))


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 3, 15, 16, 90]), min_size=1, max_size=8),
    count=st.integers(1, 9),
    stops=st.integers(0, 3),
)
def test_tokens_that_follow_are_those_of_one_call_each(lengths: list[int], count: int, stops: int) -> None:
    """And none is run after one of them that ends a text, in whichever sequence."""
    on, rng = backend_of("cpu"), np.random.default_rng(count)
    one, other, alone = ([started(on, length, i) for i, length in enumerate(lengths)] for _ in range(3))
    roots = rng.integers(0, VOCAB, len(lengths)).tolist()
    texts = [list(on.decode(state, root, count)) for state, root in zip(alone, roots, strict=True)]
    stop = frozenset(rng.choice(np.ravel(texts), stops).tolist())
    rows = on.decode_together(list(zip(one, roots, strict=True)), count, stop)
    ends = [text.index(token) + 1 for text in texts for token in stop if token in text]
    assert rows.T.tolist() == [text[: min([*ends, count])] for text in texts]
    assert Backend.decode_together(on, list(zip(other, roots, strict=True)), count, stop).tolist() == rows.tolist()
    assert all(states_equal(a, b) for a, b in zip(one, other, strict=True))
    assert [state.length for state in one] == [length + len(rows) for length in lengths]


def test_what_has_no_room_is_refused_before_anything_is_run() -> None:
    on = backend_of("cpu")
    states = [started(on, length, 0) for length in (0, 597)]
    with pytest.raises(BadRequest, match="context"):
        on.decode_together([(state, 1) for state in states], 4)
    assert [state.length for state in states] == [0, 597]


@pytest.mark.parametrize("name", ["reference", "cpu"])
@settings(max_examples=12, deadline=None)
@given(batches(), st.integers(0, 1 << 20))
def test_prompts_together_are_the_prompts_one_by_one(name: str, sizes: list[tuple[int, int]], seed: int) -> None:
    on, rng = backend_of(name), np.random.default_rng(seed)
    assert on.prefills_together == (name == "cpu")
    prompts = [rng.integers(0, VOCAB, count).tolist() for _, count in sizes]
    together, alone = ([started(on, length, i) for i, (length, _) in enumerate(sizes)] for _ in range(2))
    for state in together[::2]:
        on.snapshot(state)  # which owes nothing from then on
    outputs = on.prefill_together(list(zip(together, prompts, strict=True)), EVERYTHING)
    for output, state, prompt in zip(outputs, alone, prompts, strict=True):
        check_same(output, on.prefill(state, prompt, EVERYTHING))
        assert output.features is not None
        assert output.features.numpy().base is None, "who keeps a part does not keep the whole"
    roots = [Tree.root(prompt[0]) for prompt in prompts]
    check_same(  # what the states hold, before anything is settled
        on.forward(list(zip(together, roots, strict=True)), EVERYTHING),
        on.forward(list(zip(alone, roots, strict=True)), EVERYTHING),
    )
    assert all(states_equal(a, b) for a, b in zip(together, alone, strict=True))


def test_what_cannot_be_prefilled_together_is_refused() -> None:
    on = backend_of("cpu")
    a, b = started(on, 3, 0), started(on, 3, 0)
    for batch in ([(a, [1]), (a, [2])], [(a, [1]), (b, [])], [(a, [1] * 60), (b, [2] * 5)], [(a, [1]), (b, [VOCAB])]):
        with pytest.raises(BadRequest):
            on.prefill_together(batch)
    assert (a.length, b.length) == (3, 3)


def test_so_it_is_beside_a_sequence_whose_keys_are_many() -> None:
    """More than one segment of them: few sequences split their segments among the threads, many do not."""
    for others in (0, 1, 7):
        check_batch(backend_of("cpu"), [(530, 3), *[(9, 2)] * others], 7)


def decode_together(
    on: Backend, prompts: list[list[int]], how: list[Sampling], trees: int, count: int, seed: int
) -> list[list[int]]:
    """Greedy and sampled sequences of different lengths, all in each forward, with trees of random guesses and true
    ones; a sequence that has its tokens leaves."""
    rng = np.random.default_rng(seed)
    want = LOGITS if any(not each.greedy for each in how) else wanted_for(None)
    truth = [plain(p, s, on=on.name, max_tokens=count) for p, s in zip(prompts, how, strict=True)]
    states, texts = [on.new_state(256) for _ in prompts], [list(p) for p in prompts]
    for i, prompt in enumerate(prompts):
        on.prefill(states[i], prompt, Want("none"))
        texts[i].append(truth[i][0])  # the prompt's own answer is not what is tested here
    while running := [i for i, text in enumerate(texts) if len(text) < len(prompts[i]) + count]:
        batch = []
        for i in running:
            tree = random_tree(rng, int(rng.integers(1, trees + 1)), VOCAB)
            tree.tokens[0] = texts[i][-1]
            for node, depth in enumerate(tree.depths().tolist()):
                place = len(texts[i]) - 1 + depth - len(prompts[i])
                if node and rng.random() < 0.7 and place < count:
                    tree.tokens[node] = truth[i][place]
            batch.append((states[i], tree))
        on.forward(batch, want)
        for i, (state, tree) in zip(running, batch, strict=True):
            path, tokens = on.verify(state, tree, how[i], texts[i])
            on.commit(state, path)
            texts[i] += tokens
    return [text[len(prompt) :][:count] for text, prompt in zip(texts, prompts, strict=True)]


def check_texts(name: str, lengths: list[int], trees: int, seed: int) -> None:
    prompts = [prompt_of(length, seed + i) for i, length in enumerate(lengths)]
    how = [Sampling() if (seed + i) % 2 else SAMPLED for i in range(len(lengths))]
    expected = [plain(p, s, on=name, max_tokens=12) for p, s in zip(prompts, how, strict=True)]
    assert decode_together(backend_of(name), prompts, how, trees, 12, seed) == expected


texts = given(st.lists(st.integers(1, 70), min_size=1, max_size=8), st.sampled_from([1, 2, 8]), st.integers(0, 1 << 20))


@settings(max_examples=4, deadline=None)
@texts
def test_text_in_a_batch_is_the_plain_text_on_the_reference(lengths: list[int], trees: int, seed: int) -> None:
    check_texts("reference", lengths, trees, seed)


@settings(max_examples=15, deadline=None)
@texts
def test_text_in_a_batch_is_the_plain_text_on_the_cpu(lengths: list[int], trees: int, seed: int) -> None:
    check_texts("cpu", lengths, trees, seed)


@backends
def test_what_was_drafted_belongs_to_the_state(name: str) -> None:
    """Other sequences may run, prefill and decode between its forward and its commit."""
    on = backend_of(name)
    tree = random_tree(np.random.default_rng(3), 9, VOCAB)
    busy, quiet, other = started(on, 20, 0), started(on, 20, 0), started(on, 33, 1)
    on.forward([(quiet, tree)], LOGITS)
    walked = on.verify(quiet, tree, SAMPLED, [1, 2, 3])
    on.commit(quiet, walked[0])
    on.forward([(busy, tree)], LOGITS)
    assert on.verify(busy, tree, SAMPLED, [1, 2, 3]) == walked
    on.forward([(other, tree)], LOGITS)
    on.prefill(other, [5, 6])
    list(on.decode(other, 7, 3))
    on.commit(busy, walked[0])
    assert states_equal(busy, quiet)


@backends
def test_what_a_forward_cannot_run_is_refused(name: str) -> None:
    on = backend_of(name)
    a, b, tree = started(on, 3, 0), started(on, 3, 0), Tree.chain([1, 2])
    chain = Tree.chain(list(range(33)))
    for batch, why in (
        ([], "takes 1 to 64 nodes"),
        ([(a, chain), (b, chain)], "not 66"),
        ([(a, tree), (a, tree)], "one tree of a sequence"),
        ([(a, tree), (b, Tree.chain([VOCAB]))], "Token ids"),
        ([(a, tree), (on.new_state(1), tree)], "do not fit"),
    ):
        with pytest.raises(BadRequest, match=why):
            on.forward(batch)
        assert a.drafted is None
    on.forward([(a, tree)])
    with pytest.raises(BadRequest, match="do not fit"):
        on.forward([(a, Tree.chain([3])), (on.new_state(1), tree)])
    assert a.drafted is not None, "a refusal changes nothing"
    with pytest.raises(BadRequest, match="not the last"):
        on.verify(a, Tree.chain([1, 2]))
    with pytest.raises(BadRequest, match="not a path"):
        on.commit(a, [1])
    on.commit(a, [0])
    for late in (lambda: on.verify(a, tree), lambda: on.commit(a, [0])):
        with pytest.raises(BadRequest, match="forward first"):
            late()


@backends
def test_snapshots_are_of_the_size_that_was_planned(name: str) -> None:
    on = backend_of(name)
    for length in (0, 1, 70):
        snapshot = on.snapshot(started(on, length, 0))
        assert snapshot.nbytes == on.snapshot_bytes(length)
    parts = {part.what: part.nbytes for part in on.memory(100)}
    more = {part.what: part.nbytes for part in on.memory(100, sequences=3, snapshots=1234)}
    assert more.pop("snapshots") == 1234
    assert parts.pop("snapshots") == 0
    assert more.pop("weights") == parts.pop("weights")
    assert more == {what: 3 * nbytes for what, nbytes in parts.items()}
