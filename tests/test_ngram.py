"""Drafts from the text itself: what followed before is guessed again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from draft_cases import Alone, guess, prompt_of
from warpsmith.draft.base import ScoredTree
from warpsmith.draft.ngram import KEYS, LOOKED_AT, NGram, NGramMemory


def observed(proposer: NGram, tokens: Sequence[int]) -> Alone:
    draft = Alone(proposer)
    draft.observe(list(tokens), 0, None, None)
    return draft


def chain_of(tree: ScoredTree | None) -> list[int]:
    """The tokens along the likeliest chain."""
    assert tree is not None
    node, tokens = 0, []
    while len(children := np.flatnonzero(tree.parents == node)):
        node = int(children[0])
        tokens.append(int(tree.tokens[node]))
    return tokens


def test_what_followed_before_is_guessed_again() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
    assert chain_of(guess(observed(NGram(), text), [*text, 3], depth=5)) == [4, 5, 6, 7, 8]
    assert guess(observed(NGram(), text), [*text, 0]) is None
    assert guess(observed(NGram(), []), [5]) is None


def test_the_longest_match_counts_most() -> None:
    text = [9, 1, 2, 3, 50, 51, 0, 1, 2, 3, 60, 61, 0, 7, 2, 3, 70, 71, 0, 9, 1, 2]
    tree = guess(observed(NGram(), text), [*text, 3])
    assert chain_of(tree)[:2] == [50, 51]
    assert tree is not None
    assert {50, 60} <= set(tree.tokens[tree.parents == 0].tolist()), "the shorter ones have a branch of their own"
    assert (tree.parents[1:] < np.arange(1, len(tree))).all()
    assert (np.diff(tree.scores) <= 0).all()


def test_one_long_match_outweighs_many_short_and_later_ones() -> None:
    short = [token for i in range(12) for token in (100 + i, 1, 2, 3, 60 + i)]
    text = [8, 9, 1, 2, 3, 50, 51, 52, *short, 8, 9, 1, 2]
    tree = guess(observed(NGram(), text), [*text, 3], depth=3)
    assert tree is not None
    assert {50, 71} <= set(tree.tokens[tree.parents == 0].tolist())
    assert chain_of(tree) == [50, 51, 52], "all the way"


def test_longer_agreement_is_more_certain() -> None:
    text = list(range(40))
    short = guess(observed(NGram(), [*text, 99, 20]), [*text, 99, 20, 21], depth=3)
    long = guess(observed(NGram(), [*text, *range(10, 20)]), [*text, *range(10, 20), 20], depth=3)
    assert short is not None
    assert long is not None
    assert long.conditionals()[1] > short.conditionals()[1]
    assert (np.diff(short.conditionals()[1:]) > 0).all(), "each step that holds makes the next more certain"


def test_a_text_that_goes_in_circles_is_followed_round() -> None:
    text = [5, 6, 7] * 4
    assert chain_of(guess(observed(NGram(), text[:-1]), text, depth=10)) == ([5, 6, 7] * 4)[:10]


def test_budgets_and_depths_are_kept() -> None:
    text = prompt_of(400)
    for nodes in (1, 5, 40):
        for depth in (1, 3, 50):
            tree = guess(observed(NGram(nodes), text), [*text, text[200]], depth)
            if tree is not None:
                assert len(tree) <= nodes + 1
                assert tree.depths().max() <= depth


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 3), max_size=80),
    st.lists(st.integers(0, 3), max_size=40),
    st.integers(0, 80),
    st.lists(st.booleans(), min_size=3, max_size=3),
)
@example([0, 1, 2, 3, 0, 1] * 8, [1, 1], 20, [True, True, True])
def test_going_back_leaves_the_index_of_a_text_that_never_went_on(
    a: list[int], b: list[int], cut: int, looks: list[bool]
) -> None:
    """Whenever somebody looked at it, which is when it grows."""
    cut = min(cut, len(a))
    draft = Alone(NGram())

    def observe(tokens: list[int], position: int, look: bool) -> None:
        draft.observe(tokens, position, None, None)
        if look:
            guess(draft, [*draft.memory.tokens, 0])

    observe(a[:cut], 0, looks[0])
    saved = draft.snapshot()
    observe(a[cut:], cut, looks[1])
    draft.restore(saved)
    observe(b, cut, looks[2])
    fresh = Alone(NGram())
    for i, token in enumerate(a[:cut] + b):
        fresh.observe([token], i, None, None)
        guess(fresh, [*fresh.memory.tokens, 0])
    guess(draft, [*draft.memory.tokens, 0])
    assert vars(draft.memory) == vars(fresh.memory)
    draft.reset()
    draft.observe(b, 0, None, None)
    draft.restore(saved)
    assert draft.memory.tokens == a[:cut]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=3, max_size=60))
def test_the_first_guess_continues_a_longest_match(text: list[int]) -> None:
    """Against a search of the whole text."""
    past, root = text[:-1], text[-1]
    best, following = 0, set()
    for place in range(len(past)):
        length = 0
        while length <= place and length < len(text) and past[place - length] == text[-1 - length]:
            length += 1
        if length >= min(KEYS):
            token = past[place + 1] if place + 1 < len(past) else root
            following = following | {token} if length == best else {token} if length > best else following
            best = max(best, length)
    tree = guess(observed(NGram(), past), text, depth=1)
    if tree is None:
        assert best == 0
    elif best < 32:
        assert following <= set(tree.tokens[1:].tolist())


def test_a_text_for_which_nobody_guesses_is_not_indexed() -> None:
    draft = observed(NGram(), [1, 2, 3] * 5)
    assert not any(draft.memory._last)
    guess(draft, [1, 2, 3] * 5 + [1])
    assert all(draft.memory._last)


def test_a_step_looks_at_a_bounded_number_of_places(monkeypatch: pytest.MonkeyPatch) -> None:
    draft, looks = Alone(NGram()), 0
    agreement = NGramMemory._agreement

    def counted(self: NGramMemory, *args: Any) -> int:
        nonlocal looks
        looks += 1
        return agreement(self, *args)

    monkeypatch.setattr(NGramMemory, "_agreement", counted)
    draft.observe([1, 2] * 3000, 0, None, None)
    guess(draft, [*[1, 2] * 3000, 1])
    assert 0 < looks <= LOOKED_AT
