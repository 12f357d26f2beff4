"""Every proposer in the decode loop: it finds what it should, and the text is the plain text whatever it finds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from math import erfc, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import warpsmith
from random_drafts import draft_config, draft_in_memory, random_weights, write_draft
from random_models import random_tensors, small_config
from warpsmith.backend.base import LOGITS, Backend, Output, Want
from warpsmith.backend.cpu import CpuBackend
from warpsmith.backend.cpu.draft import CpuDraft
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.backend.sampling import Sampling
from warpsmith.backend.tree import MAX_NODES, Tree
from warpsmith.draft.base import Context, Draft, Proposer, ScoredTree
from warpsmith.draft.budget import LISTENS, REFILL, Budgeted
from warpsmith.draft.costs import Costs
from warpsmith.draft.dflash import DFlash
from warpsmith.draft.mtp import MTP
from warpsmith.draft.ngram import KEYS, LOOKED_AT, NGram
from warpsmith.draft.relay import Relay
from warpsmith.draft.select import find_draft, make_proposer
from warpsmith.engine.conversation import Conversation
from warpsmith.engine.loop import Generation
from warpsmith.errors import BadFile, BadRequest, ModelNotFound

# Sixteen tokens: even a draft that knows nothing is right now and then.
CONFIG = small_config(vocab=16, mtp_layers=1)
SAMPLED = Sampling(temperature=0.9, top_k=9, top_p=0.95, repeat_penalty=1.1, repeat_last_n=8, seed=3)


@cache
def backend(name: str, seed: int = 0) -> Backend:
    tensors = random_tensors(CONFIG, seed)
    return ReferenceBackend(CONFIG, tensors) if name == "reference" else CpuBackend(CONFIG, tensors, threads=1)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab, length).tolist()


def drafts(on: Backend, nodes: int, seed: int = 0) -> dict[str, Draft]:
    sliding = draft_config(CONFIG, windows=(9, None), causal=(True, False))
    made: dict[str, Draft] = {"ngram": NGram(nodes), "mtp": MTP(on, nodes)}
    if type(on).embed is not Backend.embed:
        made["dflash"] = DFlash(draft_in_memory(sliding, seed), on, nodes, context_rows=40)
    return made


CHEAP = Costs.between({1: 0.001, 64: 0.002})  # trees of every size pay


class Steady(Relay):
    """On a machine where a step and a plain token take a millisecond, always."""

    def __init__(self, *drafts: Draft) -> None:
        super().__init__([Budgeted(draft, CHEAP) for draft in drafts], clock=lambda: 0.0)

    def spent(self, tokens: int, seconds: float, forward_seconds: float | None) -> None:
        resting = forward_seconds is None
        super().spent(tokens, 0.001 * (tokens if resting else 1.1), None if resting else 0.001)


def run(conversation: Conversation, prompt: Sequence[int], sampling: Sampling, **options: Any) -> list[int]:
    return [token for tokens in Generation(conversation, prompt, sampling, **options) for token in tokens]


# -- the promise ------------------------------------------------------------------------------------------------------


requests = given(st.integers(0, 1000), st.integers(1, 90), st.sampled_from([1, 2, 7, 22, MAX_NODES - 1]), st.booleans())


@settings(max_examples=3, deadline=None)
@requests
def test_text_is_the_same_with_every_draft_on_the_reference(seed: int, length: int, nodes: int, greedy: bool) -> None:
    check_texts("reference", seed, length, min(nodes, 22), greedy)


@settings(max_examples=25, deadline=None)
@requests
def test_text_is_the_same_with_every_draft_on_the_cpu(seed: int, length: int, nodes: int, greedy: bool) -> None:
    check_texts("cpu", seed, length, nodes, greedy)


def check_texts(name: str, seed: int, length: int, nodes: int, greedy: bool) -> None:
    """Several turns, so that drafts go on, come back to snapshots and start anew."""
    on = backend(name, seed % 3)
    sampling = Sampling() if greedy else Sampling(temperature=1.0, seed=seed)
    rng = np.random.default_rng(seed)
    prompt = prompt_of(length, seed)
    turns: list[tuple[list[int], int, list[int]]] = []
    plainly = Conversation(on, 400)
    for turn in range(3):
        limit = int(rng.integers(1, 20))
        answer = run(plainly, prompt, sampling, max_tokens=limit)
        turns.append((prompt, limit, answer))
        following = prompt_of(int(rng.integers(1, 20)), seed + turn + 1)
        prompt = [prompt + answer + following, prompt + following, following][rng.integers(3)]
    made = drafts(on, nodes, seed)
    for proposer in (*made.values(), *map(Steady, made.values()), Steady(*made.values())):
        proposer.reset()
        conversation = Conversation(on, 400, proposer)
        for prompt, limit, answer in turns:
            assert run(conversation, prompt, sampling, max_tokens=limit) == answer, proposer


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft", ["ngram", "mtp", "dflash", "relay"])
@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_every_stop_condition_ends_the_text_where_plain_decoding_does(
    name: str, draft: str, sampling: Sampling
) -> None:
    on = backend(name)
    made = drafts(on, 30)
    proposer: Proposer = Steady(*made.values()) if draft == "relay" else made[draft]
    prompt = prompt_of(20, 9)
    truth = run(Conversation(on, 100), prompt, sampling, max_tokens=40)
    accepted = 0
    for place in (1, 9, 33) if name == "reference" else range(1, 40, 3):
        seen: list[int] = []
        conversation = Conversation(on, 100, proposer)
        proposer.reset()
        generation = Generation(
            conversation,
            prompt,
            sampling,
            until=lambda token: seen.append(token) or len(seen) == place + 1,  # noqa: B023
        )
        tokens = [token for tokens in generation for token in tokens]
        assert tokens == truth[: place + 1]
        assert conversation.committed == prompt + truth[:place]
        accepted += generation.stats.accepted_tokens
        stop = truth[place]
        stopped = run(conversation, prompt, sampling, stop_ids=frozenset([stop]), max_tokens=40)
        assert stopped == truth[: truth.index(stop) + 1]
        assert conversation.committed == prompt + stopped[:-1]
        assert run(conversation, prompt, sampling, max_tokens=place) == truth[:place]
        assert conversation.committed == (prompt + truth[:place])[:-1]
    full = Conversation(on, len(prompt) + 15, proposer)
    proposer.reset()
    assert run(full, prompt, sampling) == truth[:15], "where the context is full"
    assert accepted > 0, "nothing was accepted, so nothing was tested"


def test_the_tests_above_accept_guesses_of_every_kind() -> None:
    on = backend("reference")
    for name, draft in drafts(on, 63).items():
        generation = Generation(Conversation(on, 300, draft), prompt_of(30), Sampling(), max_tokens=60)
        list(generation)
        assert generation.stats.accepted_tokens > 5, name
        assert generation.stats.mode == name


# -- distributions ----------------------------------------------------------------------------------------------------


def chi_square_p(observed: np.ndarray, expected: np.ndarray) -> float:
    """The chance of counts at least this far from `expected`; cells are pooled until each expects five."""
    order = np.argsort(expected)
    pooled: list[tuple[float, float]] = []
    seen = hoped = 0.0
    for cell in order:
        seen, hoped = seen + observed[cell], hoped + expected[cell]
        if hoped >= 5:
            pooled.append((seen, hoped))
            seen = hoped = 0.0
    pooled[-1] = (pooled[-1][0] + seen, pooled[-1][1] + hoped)
    statistic = sum((o - e) ** 2 / e for o, e in pooled)
    degrees = len(pooled) - 1
    # Wilson and Hilferty: the cube root of a chi-square over its degrees is very nearly normal
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / np.sqrt(2 / (9 * degrees))
    return 0.5 * erfc(z / sqrt(2))


def exact_pairs(on: Backend, prompt: list[int], sampling: Sampling) -> np.ndarray:
    """The probability of each pair of second and third tokens after the prompt, from the logits."""
    state = on.new_state(64)
    logits = on.prefill(state, prompt, LOGITS).logits
    assert logits is not None
    pairs = np.zeros((CONFIG.vocab, CONFIG.vocab))
    for token, chance in enumerate(distribution(logits[-1], sampling)):
        tree = Tree(np.array([token, *range(CONFIG.vocab)]), np.array([-1] + [0] * CONFIG.vocab))
        rows = on.forward(state, tree, LOGITS).logits
        assert rows is not None
        second = distribution(rows[0], sampling)
        pairs += chance * second[:, None] * np.stack([distribution(row, sampling) for row in rows[1:]])
    return pairs.ravel()


def distribution(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """By the definition: top-k, top-p over what is left of temperature 1, then the temperature."""
    order = np.argsort(-logits, kind="stable")[: sampling.top_k or None]
    likely = np.exp(logits[order].astype(np.float64))
    likely /= likely.sum()
    kept = order[: int(np.searchsorted(np.cumsum(likely), sampling.top_p)) + 1]
    weights = np.exp(logits[kept].astype(np.float64) / sampling.temperature)
    result = np.zeros(len(logits))
    result[kept] = weights / weights.sum()
    return result


class Leaning(Generation):
    """A walk with the classic mistake: it takes the draft's first guess where that is likely enough."""

    def _walk(self, tree: Tree, output: Output) -> tuple[list[int], list[int]]:
        self.tree = tree
        return super()._walk(tree, output)

    def _choose(self, output: Output, row: int, run: list[int]) -> int:
        if row >= 0 and len(children := np.flatnonzero(self.tree.parents == row)):
            assert output.logits is not None
            guessed, logits = int(self.tree.tokens[children[0]]), output.logits[row]
            if logits[guessed] > logits.max() - 1:
                return guessed
        return super()._choose(output, row, run)


def pairs_drawn(kind: type[Generation], sampling: Sampling, runs: int) -> np.ndarray:
    """How often each pair of second and third tokens came up; the third mostly inside an accepted run."""
    on, prompt = backend("cpu"), prompt_of(5, 2)
    counts = np.zeros(CONFIG.vocab**2)
    conversation = Conversation(on, 64, MTP(on, 20))
    for seed in range(runs):
        generation = kind(conversation, prompt, dataclasses.replace(sampling, seed=seed), max_tokens=4)
        tokens = [token for tokens in generation for token in tokens]
        counts[tokens[1] * CONFIG.vocab + tokens[2]] += 1
    return counts


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=1.0), Sampling(temperature=0.6), Sampling(temperature=1.3, top_k=6, top_p=0.9)],
    ids=["warm", "cool", "truncated"],
)
def test_drawn_tokens_have_the_model_s_distribution(sampling: Sampling) -> None:
    runs = 800
    expected = exact_pairs(backend("cpu"), prompt_of(5, 2), sampling) * runs
    counts = pairs_drawn(Generation, sampling, runs)
    assert counts[expected == 0].sum() == 0
    assert chi_square_p(counts, expected) > 0.01


def test_the_test_above_notices_a_walk_that_leans_to_the_draft() -> None:
    sampling, runs = Sampling(temperature=1.0), 800
    expected = exact_pairs(backend("cpu"), prompt_of(5, 2), sampling) * runs
    assert chi_square_p(pairs_drawn(Leaning, sampling, runs), expected) < 1e-6


@pytest.mark.parametrize("name", ["ngram", "mtp", "dflash", "relay"])
def test_long_texts_in_which_drafts_rest_and_are_asked_again(name: str) -> None:
    """Dear enough to be put to rest, cheap enough to be tried again, and heard by turns."""
    on = backend("cpu")
    nodes: list[int] = []
    for seed in range(4):
        made = drafts(on, 30, seed)
        proposer = Steady(*made.values()) if name == "relay" else Steady(made[name])
        conversation, plainly = Conversation(on, 500, proposer), Conversation(on, 500)
        prompt = prompt_of(30, seed)
        for sampling in (Sampling(), SAMPLED):
            answer = run(plainly, prompt, sampling, max_tokens=100)
            for _ in range(2):  # once they are open, once they have to wait first
                on_step = lambda step: nodes.append(len(step.tree))  # noqa: E731
                assert run(conversation, prompt, sampling, max_tokens=100, on_step=on_step) == answer
                for budgeted in proposer.drafts:
                    budgeted.account.credit, budgeted.account.open, budgeted.account._needed = -0.1, False, 9.9
                    budgeted.account._failures = 5
            prompt = prompt[:10] + answer
    assert sum(n > 1 for n in nodes) > 20
    assert nodes.count(1) > 100


@pytest.mark.parametrize("kind", ["ngram", "dflash"])
@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_a_draft_that_rested_guesses_as_one_that_never_did(name: str, kind: str) -> None:
    """If it needs tokens only, or no rows from further back than it listens before it is asked again."""
    on, text, heard = backend(name), prompt_of(90, 12), 90 - LISTENS
    windows = draft_config(CONFIG, windows=(9, LISTENS), causal=(True, True), head_dim=32)
    state = on.new_state(200)
    trees = []
    for rests in (False, True):
        draft: Draft = NGram() if kind == "ngram" else DFlash(draft_in_memory(windows), on)
        held = Budgeted(draft, CHEAP)
        state = on.new_state(200)
        rows = on.prefill(state, text, draft.wants).features
        for start, end in ((0, 40), (40, heard), (heard, 90)):
            if rests and start == 40:
                held.account.open, held.account.credit, held.account._needed = False, 0.0, 49.9 * REFILL
                assert held.rest == (heard - 40 if rows is not None else 50)
            held.observe(text[start:end], start, None if rows is None else rows[start:end], None)
            held.spent(end - start, 0.001 * (end - start), None)
        assert held.account.open
        trees.append(draft.propose(Context([*text, text[30]], state, 10)))
    never, rested = trees
    assert never is not None
    assert rested is not None
    assert never.tokens.tolist() == rested.tokens.tolist()
    assert never.scores == pytest.approx(rested.scores, abs=1e-5)


# -- n-grams ----------------------------------------------------------------------------------------------------------


def observed(draft: Draft, tokens: Sequence[int]) -> Draft:
    draft.observe(list(tokens), 0, None, None)
    return draft


def guess(draft: Draft, ids: Sequence[int], depth: int = 10) -> ScoredTree | None:
    return draft.propose(Context(list(ids), None, depth))  # type: ignore[arg-type]


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
@given(st.lists(st.integers(0, 3), max_size=80), st.lists(st.integers(0, 3), max_size=40), st.integers(0, 80))
@example([0, 1, 2, 3, 0, 1] * 8, [1, 1], 20)
def test_going_back_leaves_the_index_of_a_text_that_never_went_on(a: list[int], b: list[int], cut: int) -> None:
    cut = min(cut, len(a))
    draft = NGram()
    draft.observe(a[:cut], 0, None, None)
    saved = draft.snapshot()
    draft.observe(a[cut:], cut, None, None)
    draft.restore(saved)
    draft.observe(b, cut, None, None)
    fresh = NGram()
    for i, token in enumerate(a[:cut] + b):
        fresh.observe([token], i, None, None)
    assert (draft._tokens, draft._last, draft._before) == (fresh._tokens, fresh._last, fresh._before)
    draft.reset()
    draft.observe(b, 0, None, None)
    draft.restore(saved)
    assert draft._tokens == a[:cut]


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


def test_a_step_looks_at_a_bounded_number_of_places(monkeypatch: pytest.MonkeyPatch) -> None:
    draft, looks = NGram(), 0
    agreement = NGram._agreement

    def counted(self: NGram, *args: Any) -> int:
        nonlocal looks
        looks += 1
        return agreement(self, *args)

    monkeypatch.setattr(NGram, "_agreement", counted)
    draft.observe([1, 2] * 3000, 0, None, None)
    guess(draft, [*[1, 2] * 3000, 1])
    assert 0 < looks <= LOOKED_AT


# -- MTP --------------------------------------------------------------------------------------------------------------


def mtp_after(on: Backend, pieces: list[list[int]], root: int, nodes: int = 30) -> ScoredTree:
    """The guess of a draft that heard the text in pieces, each committed by itself."""
    draft, state, position = MTP(on, nodes), on.new_state(200), 0
    for piece in pieces:
        hidden = on.prefill(state, piece, Want("none", hidden=True)).hidden
        draft.observe(piece, position, None, hidden)
        position += len(piece)
    ids = [token for piece in pieces for token in piece]
    tree = draft.propose(Context([*ids, root], state, 10))
    assert tree is not None
    return tree


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_the_head_is_run_on_each_token_and_the_hidden_before_it(name: str) -> None:
    on, text, root = backend(name), prompt_of(20, 4), 3
    state = on.new_state(200)
    hidden = on.prefill(state, text, Want("none", hidden=True)).hidden
    assert hidden is not None
    first = on.mtp(state, [*text[1:], root], hidden, 0, Want("logits", hidden=True))
    assert first.logits is not None
    assert first.hidden is not None
    beliefs = [first.logits[-1] - np.log(np.exp(first.logits[-1].astype(np.float64)).sum())]
    best = int(beliefs[0].argmax())
    second = on.mtp(state, [best], first.hidden[-1:], len(text), Want("logits"))
    assert second.logits is not None
    beliefs.append(second.logits[0] - np.log(np.exp(second.logits[0].astype(np.float64)).sum()))
    tree = mtp_after(on, [text], root)
    for node in range(1, len(tree)):
        path = tree.path(node)[1:]
        if len(path) <= 2:
            score = sum(beliefs[d][tree.tokens[n]] for d, n in enumerate(path))
            assert tree.scores[node] == pytest.approx(score, abs=2e-3)
    assert tree.depths().max() >= 2


def test_mtp_in_pieces_equals_mtp_at_once() -> None:
    on, text = backend("reference"), prompt_of(60, 5)
    whole = mtp_after(on, [text], 7)
    for cuts in ([1] * 60, [10, 1, 1, 48], [59, 1]):
        starts = np.cumsum([0, *cuts])
        pieces = [text[a:b] for a, b in pairwise(starts)]
        tree = mtp_after(on, pieces, 7)
        assert tree.tokens.tolist() == whole.tokens.tolist()
        assert tree.scores == pytest.approx(whole.scores, abs=1e-4)


def test_rejected_guesses_leave_no_trace_in_the_head_s_memory() -> None:
    on, text = backend("reference"), prompt_of(40, 6)
    draft, state = MTP(on, 30), on.new_state(200)
    output = on.prefill(state, text[:10], Want("none", hidden=True))
    draft.observe(text[:10], 0, None, output.hidden)
    for i in range(10, 40):
        assert draft.propose(Context(text[: i + 1], state, 10)) is not None
        output = on.forward(state, Tree.chain([text[i]]), Want("none", hidden=True))
        on.commit(state, [0])
        draft.observe([text[i]], i, None, output.hidden)
    tree, expected = draft.propose(Context([*text, 2], state, 10)), mtp_after(on, [text], 2)
    assert tree is not None
    assert tree.tokens.tolist() == expected.tokens.tolist()
    assert tree.scores == pytest.approx(expected.scores, abs=1e-4)


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_mtp_comes_back_with_a_snapshot(name: str) -> None:
    on, text, other = backend(name), prompt_of(70, 7), prompt_of(30, 8)
    draft, state = MTP(on, 30), on.new_state(200)
    draft.observe(text[:64], 0, None, on.prefill(state, text[:64], Want("none", hidden=True)).hidden)
    draft.catch_up(state)
    saved, snapshot = draft.snapshot(), on.snapshot(state)
    draft.observe(other, 64, None, on.prefill(state, other, Want("none", hidden=True)).hidden)
    draft.propose(Context([*text[:64], *other, 1], state, 10))
    on.restore(state, snapshot)
    draft.restore(saved)
    draft.observe(text[64:], 64, None, on.prefill(state, text[64:], Want("none", hidden=True)).hidden)
    tree = draft.propose(Context([*text, 5], state, 10))
    expected = mtp_after(on, [text[:64], text[64:]], 5)
    assert tree is not None
    assert tree.tokens.tolist() == expected.tokens.tolist()
    assert tree.scores == pytest.approx(expected.scores, abs=2e-3)


def test_of_a_long_past_mtp_hears_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that wait are bounded; after a gap the head begins anew, as if the text had begun there."""
    monkeypatch.setattr("warpsmith.draft.mtp.LISTENS", 16)
    on, text = backend("reference"), prompt_of(60, 9)
    draft, state = MTP(on, 30), on.new_state(200)
    hidden = on.prefill(state, text, Want("none", hidden=True)).hidden
    assert hidden is not None
    for i in range(60):
        draft.observe(text[i : i + 1], i, None, hidden[i : i + 1])
        if i == 10:
            draft.catch_up(state)
            assert draft._rows == 10
        assert sum(len(tokens) for tokens, _ in draft._waiting) <= 17
    kept = draft._waiting[0][0]
    tree = draft.propose(Context([*text, 4], state, 10))
    assert tree is not None
    assert int(kept[0]) == text[60 - 16]
    other = on.new_state(200)
    output = on.mtp(other, [*text[-16:], 4], hidden[-17:], 0, Want("logits"))
    assert output.logits is not None
    beliefs = output.logits[-1] - np.log(np.exp(output.logits[-1].astype(np.float64)).sum())
    assert tree.scores[1] == pytest.approx(beliefs.max(), abs=1e-4)


@pytest.mark.parametrize("gap", [1, 7, 40])
def test_after_a_gap_mtp_goes_on_with_what_it_heard(gap: int) -> None:
    """To the block it is as if the tokens it was not told of had never been."""
    on, text = backend("reference"), prompt_of(60 + gap, 11)
    draft, state = MTP(on, 30), on.new_state(200)
    hidden = on.prefill(state, text, Want("none", hidden=True)).hidden
    assert hidden is not None
    draft.observe(text[:40], 0, None, hidden[:40])
    draft.observe(text[40 : 40 + gap], 40, None, None)
    assert draft.propose(Context(text[: 41 + gap], state, 10)) is None, "it does not know what came before the root"
    draft.observe(text[40 + gap :], 40 + gap, None, hidden[40 + gap :])
    tree = draft.propose(Context([*text, 4], state, 10))
    assert tree is not None
    other = on.new_state(200)
    heard = [*range(1, 40), *range(41 + gap, 60 + gap)]  # tokens whose predecessor's hidden was told
    tokens, before = [*(text[i] for i in heard), 4], [*(hidden[i - 1] for i in heard), hidden[-1]]
    output = on.mtp(other, tokens, np.array(before), 0, Want("logits"))
    assert output.logits is not None
    beliefs = output.logits[-1] - np.log(np.exp(output.logits[-1].astype(np.float64)).sum())
    assert tree.scores[1] == pytest.approx(beliefs.max(), abs=1e-4)


def test_mtp_at_the_end_of_the_context_stays_inside() -> None:
    for name in ("reference", "cpu"):
        on = backend(name)
        plain = run(Conversation(on, 24), prompt_of(10), Sampling())
        assert run(Conversation(on, 24, MTP(on)), prompt_of(10), Sampling()) == plain
        assert len(plain) == 14


# -- choosing a draft -------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_names_and_paths_choose_drafts(tmp_path: Path) -> None:
    on = backend("reference")
    assert make_proposer("none", "auto", on) is None
    assert make_proposer("ngram", 0, on) is None
    fixed = make_proposer("ngram", 9, on)
    assert isinstance(fixed, NGram)
    assert fixed.nodes == 9
    assert isinstance(make_proposer("mtp", 4, on), MTP)
    assert isinstance(make_proposer("auto", 4, on), MTP), "the model's own head before the text"
    config = draft_config(CONFIG)
    path = write_draft(tmp_path / "model" / "draft", "safetensors", config, random_weights(config))
    assert isinstance(make_proposer(path, 4, on), DFlash)
    assert find_draft(str(path), "auto") == path
    assert [find_draft(name, 3) for name in ("auto", "none", "ngram", "mtp")] == ["auto", "none", "ngram", "mtp"]
    assert isinstance(make_proposer("auto", 4, on, tmp_path / "model"), DFlash), "and its own draft before that"
    assert isinstance(make_proposer("auto", 4, on, tmp_path / "model" / "file.gguf"), DFlash)
    headless = ReferenceBackend(small_config(vocab=24), random_tensors(small_config(vocab=24)))
    assert isinstance(make_proposer("auto", 4, headless, tmp_path / "model"), NGram), "made for another model"


@pytest.mark.parametrize(("tokens", "names"), [({"dflash": 0.4, "mtp": 0.2}, "ngram+dflash"),
                                               ({"dflash": 0.7, "mtp": 0.2}, "ngram+mtp"),
                                               ({"dflash": 1.4, "mtp": 0.7}, "ngram")])  # fmt: skip
def test_auto_leaves_out_drafts_whose_guesses_take_too_long(
    tokens: dict[str, float], names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warpsmith.draft.costs.tokens_of_a_guess", lambda draft, on: tokens[draft.name])
    config = draft_config(CONFIG)
    write_draft(tmp_path / "draft", "safetensors", config, random_weights(config))
    proposer = make_proposer("auto", "auto", backend("cpu"), tmp_path)
    assert proposer is not None
    assert proposer.name == names


def test_auto_asks_the_text_first_and_then_the_model_s_own_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpsmith.draft.costs.tokens_of_a_guess", lambda draft, on: 0.4)
    proposer = make_proposer("auto", "auto", backend("cpu"))
    assert isinstance(proposer, Relay)
    assert proposer.name == "ngram+mtp"
    assert proposer.wants == Want("none", hidden=True)
    headless = CpuBackend(small_config(vocab=16), random_tensors(small_config(vocab=16)), threads=1)
    alone = make_proposer("auto", "auto", headless)
    assert isinstance(alone, Budgeted)
    assert alone.name == "ngram"


def test_wisp_has_a_draft_of_its_own() -> None:
    with warpsmith.load(device="cpu", context=256) as llm:
        fixed = make_proposer("auto", 4, llm.backend, llm.checkpoint.path)
        assert isinstance(fixed, DFlash)
        assert isinstance(fixed.network, CpuDraft)


def test_an_automatic_budget_measures_the_machine(tmp_path: Path) -> None:
    on = backend("cpu")
    proposer = make_proposer("ngram", "auto", on)
    assert isinstance(proposer, Budgeted)
    assert proposer.name == "ngram"
    assert proposer.costs.seconds[0] > 0
    assert len(list((tmp_path / "cache" / "warpsmith" / "costs").iterdir())) == 1


@pytest.mark.parametrize(
    ("draft", "budget", "error", "words"),
    [
        ("ngrma", "auto", BadRequest, "no draft 'ngrma'"),
        ("ngram", -1, BadRequest, "budget of -1"),
        ("ngram", 64, BadRequest, "budget of 64"),
        ("./missing/draft", 4, ModelNotFound, "missing"),
        ("somebody/nowhere", 4, ModelNotFound, "offline"),
    ],
)
def test_what_cannot_be_chosen_is_refused(draft: str, budget: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        find_draft(draft, budget, offline=True)


def test_drafts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    config = draft_config(CONFIG, vocab=999)
    path = write_draft(tmp_path / "draft", "safetensors", config, random_weights(config))
    with pytest.raises(BadRequest, match="vocabulary of 999"):
        make_proposer(path, 4, backend("reference"))
    plain = small_config(vocab=16)
    with pytest.raises(BadRequest, match="no MTP head"):
        make_proposer("mtp", 4, ReferenceBackend(plain, random_tensors(plain)))
    bare = type("Bare", (ReferenceBackend,), {"mtp": Backend.mtp, "embed": Backend.embed})
    unable = bare(CONFIG, random_tensors(CONFIG))
    with pytest.raises(BadRequest, match="does not run MTP"):
        make_proposer("mtp", 4, unable)
    fitting = draft_config(CONFIG)
    path = write_draft(tmp_path / "draft2", "safetensors", fitting, random_weights(fitting))
    with pytest.raises(BadRequest, match="does not lend"):
        make_proposer(path, 4, unable)
    assert isinstance(make_proposer("auto", 4, unable), NGram)
    (tmp_path / "text.gguf").write_text("not a draft at all, no, not at all")
    with pytest.raises(BadFile, match="GGUF"):
        make_proposer(tmp_path / "text.gguf", 4, backend("reference"))
