"""Every proposer in the decode loop: the text is the plain text whatever it finds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import erfc, sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_cases import CONFIG, Alone, backend, prompt_of, run
from random_drafts import draft_config, draft_in_memory
from random_models import random_tensors
from warpsmith.backend.base import LOGITS, Backend, State
from warpsmith.backend.cpu import CpuBackend
from warpsmith.backend.sampling import Sampling, choose
from warpsmith.backend.tree import MAX_NODES, Tree
from warpsmith.draft.base import ALONE, Context, Draft, Others, Proposer
from warpsmith.draft.budget import LISTENS, Budgeted
from warpsmith.draft.cascade import Cascade, CascadeMemory
from warpsmith.draft.costs import Costs
from warpsmith.draft.dflash import DFlash
from warpsmith.draft.economy import REFILL
from warpsmith.draft.mtp import MTP
from warpsmith.draft.ngram import NGram
from warpsmith.engine.loop import Generation
from warpsmith.engine.scheduler import Scheduler

SAMPLED = Sampling(temperature=0.9, top_k=9, top_p=0.95, repeat_penalty=1.1, repeat_last_n=8, seed=3)


def drafts(on: Backend, nodes: int, seed: int = 0) -> dict[str, Draft]:
    sliding = draft_config(CONFIG, windows=(9, None), causal=(True, False))
    made: dict[str, Draft] = {"ngram": NGram(nodes), "mtp": MTP(on, nodes)}
    if type(on).embed is not Backend.embed:
        made["dflash"] = DFlash(draft_in_memory(sliding, seed), on, nodes, context_rows=40)
    return made


CHEAP = Costs.between({1: 0.001, 64: 0.002})  # trees of every size pay


class Steady(Cascade):
    """On a machine where a step and a plain token take a millisecond, always."""

    def __init__(self, *drafts: Draft) -> None:
        super().__init__([Budgeted(draft, CHEAP) for draft in drafts], clock=lambda: 0.0)

    def spent(
        self, memory: CascadeMemory, tokens: int, seconds: float, forward_seconds: float | None, others: Others = ALONE
    ) -> None:
        resting = forward_seconds is None
        super().spent(memory, tokens, 0.001 * (tokens if resting else 1.1), None if resting else 0.001)


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
    plainly = Scheduler(on, 400)
    for turn in range(3):
        limit = int(rng.integers(1, 20))
        answer = run(plainly, prompt, sampling, max_tokens=limit)
        turns.append((prompt, limit, answer))
        following = prompt_of(int(rng.integers(1, 20)), seed + turn + 1)
        prompt = [prompt + answer + following, prompt + following, following][rng.integers(3)]
    made = drafts(on, nodes, seed)
    for proposer in (*made.values(), *map(Steady, made.values()), Steady(*made.values())):
        scheduler = Scheduler(on, 400, proposer)
        for prompt, limit, answer in turns:
            assert run(scheduler, prompt, sampling, max_tokens=limit) == answer, proposer


# Every draft, greedy and sampled, on the cpu. On the reference, which is far slower, one draft that needs nothing of it
# and one that takes its features; test_text_is_the_same_with_every_draft_on_the_reference has the others.
QUICK = (("ngram", "greedy"), ("dflash", "sampled"))
BY_DEVICE = [
    pytest.param(
        name,
        draft,
        sampling,
        id=f"{name}-{draft}-{how}",
        marks=pytest.mark.slow if name == "reference" and (draft, how) not in QUICK else [],
    )
    for name in ("reference", "cpu")
    for draft in ("ngram", "mtp", "dflash", "cascade")
    for how, sampling in (("greedy", Sampling()), ("sampled", SAMPLED))
]


@pytest.mark.parametrize(("name", "draft", "sampling"), BY_DEVICE)
def test_every_stop_condition_ends_the_text_where_plain_decoding_does(
    name: str, draft: str, sampling: Sampling
) -> None:
    on = backend(name)
    made = drafts(on, 30)
    proposer: Proposer = Steady(*made.values()) if draft == "cascade" else made[draft]
    prompt = prompt_of(20, 9)
    truth = run(Scheduler(on, 100), prompt, sampling, max_tokens=40)
    accepted = 0
    for place in (1, 9, 33) if name == "reference" else range(1, 40, 3):
        seen: list[int] = []
        scheduler = Scheduler(on, 100, proposer)
        generation = Generation(
            scheduler,
            prompt,
            sampling,
            until=lambda token: seen.append(token) or len(seen) == place + 1,  # noqa: B023
        )
        tokens = [token for tokens in generation for token in tokens]
        assert tokens == truth[: place + 1]
        assert generation.sequence.committed == prompt + truth[:place]
        accepted += generation.stats.accepted_tokens
        stop = truth[place]
        stopped = Generation(scheduler, prompt, sampling, stop_ids=frozenset([stop]), max_tokens=40)
        assert [token for tokens in stopped for token in tokens] == truth[: truth.index(stop) + 1]
        assert stopped.sequence.committed == prompt + truth[: truth.index(stop)]
        limited = Generation(scheduler, prompt, sampling, max_tokens=place)
        assert [token for tokens in limited for token in tokens] == truth[:place]
        assert limited.sequence.committed == (prompt + truth[:place])[:-1]
    full = Scheduler(on, len(prompt) + 15, proposer)
    assert run(full, prompt, sampling) == truth[:15], "where the context is full"
    assert accepted > 0, "nothing was accepted, so nothing was tested"


@pytest.mark.parametrize(("name", "draft", "sampling"), BY_DEVICE)
def test_sequences_that_share_a_draft_get_their_own_text(name: str, draft: str, sampling: Sampling) -> None:
    """Three requests by turns, of different lengths, each of which goes on with another prompt when it ends."""
    on, rng = backend(name), np.random.default_rng(1)
    made = drafts(on, 22)
    proposer: Proposer = Steady(*made.values()) if draft == "cascade" else made[draft]
    count = 20 if name == "reference" else 40
    schedulers = [Scheduler(on, 200, proposer) for _ in range(3)]
    prompts = [prompt_of(length, length) for length in (5, 31, 70)]
    accepted = 0
    for _ in range(2):
        expected = [run(Scheduler(on, 200), prompt, sampling, max_tokens=count) for prompt in prompts]
        going = [
            Generation(scheduler, prompt, sampling, max_tokens=count)
            for scheduler, prompt in zip(schedulers, prompts, strict=True)
        ]
        texts: list[list[int]] = [[], [], []]
        runs = [iter(generation) for generation in going]
        while unfinished := [i for i in range(3) if going[i].finish_reason is None]:
            turn = int(rng.choice(unfinished))
            texts[turn] += next(runs[turn])
        assert texts == expected
        accepted += sum(generation.stats.accepted_tokens for generation in going)
        prompts = [prompt + text[:4] + prompt_of(9, 2) for prompt, text in zip(prompts, texts, strict=True)]
    assert accepted > 0, "nothing was accepted, so nothing was tested"


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_each_sequence_is_guessed_from_its_own_past(name: str) -> None:
    """Guesses of two sequences by turns are those of each alone, to the bit."""
    on = backend(name)
    texts = [prompt_of(40, 3), prompt_of(40, 4)]
    for kind, draft in drafts(on, 12).items():

        def guesses(turns: list[int], draft: Draft = draft) -> dict[int, list[bytes]]:
            states = [on.new_state(100) for _ in texts]
            memories: list[Any] = [draft.new_memory() for _ in texts]
            at, made = [0, 0], {i: [] for i in set(turns)}
            for i in turns:
                start, end = at[i], at[i] + 8
                output = on.prefill(states[i], texts[i][start:end], draft.wants)
                draft.observe(memories[i], texts[i][start:end], start, output.features, output.hidden)
                tree = draft.propose(memories[i], Context(texts[i][: end + 1], states[i], 6))
                made[i].append(b"" if tree is None else tree.tokens.tobytes() + tree.scores.tobytes())
                at[i] = end
            return made

        together = guesses([0, 1, 1, 0, 0, 1, 0, 1])
        assert together == guesses([0] * 4) | guesses([1] * 4), kind


def test_the_tests_above_accept_guesses_of_every_kind() -> None:
    on = backend("reference")
    for name, draft in drafts(on, 63).items():
        generation = Generation(Scheduler(on, 300, draft), prompt_of(30), Sampling(), max_tokens=60)
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
    logits = on.prefill(state, prompt, LOGITS).logits.numpy()
    assert logits is not None
    pairs = np.zeros((CONFIG.vocab, CONFIG.vocab))
    for token, chance in enumerate(distribution(logits[-1], sampling)):
        tree = Tree(np.array([token, *range(CONFIG.vocab)]), np.array([-1] + [0] * CONFIG.vocab))
        rows = on.forward([(state, tree)], LOGITS).logits.numpy()
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


class Leaning(CpuBackend):
    """A walk with the classic mistake: it takes the draft's first guess where that is likely enough."""

    def verify(
        self, state: State, tree: Tree, sampling: Sampling | None = None, history: Sequence[int] = ()
    ) -> tuple[list[int], list[int]]:
        node, path, tokens = 0, [], []
        while node is not None:
            logits = state.drafted.output.logits.row(node)
            path.append(node)
            token = choose(logits, sampling, [*history, *tokens], state.length + len(path))
            if len(children := np.flatnonzero(tree.parents == node)):
                guessed = int(tree.tokens[children[0]])
                token = guessed if logits[guessed] > logits.max() - 1 else token
            tokens.append(token)
            node = tree.child.get((node, token))
        return path, tokens


def pairs_drawn(on: Backend, sampling: Sampling, runs: int) -> np.ndarray:
    """How often each pair of second and third tokens came up; the third mostly inside an accepted run."""
    prompt = prompt_of(5, 2)
    counts = np.zeros(CONFIG.vocab**2)
    scheduler = Scheduler(on, 64, MTP(on, 20))
    for seed in range(runs):
        generation = Generation(scheduler, prompt, dataclasses.replace(sampling, seed=seed), max_tokens=4)
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
    counts = pairs_drawn(backend("cpu"), sampling, runs)
    assert counts[expected == 0].sum() == 0
    assert chi_square_p(counts, expected) > 0.01


def test_the_test_above_notices_a_walk_that_leans_to_the_draft() -> None:
    sampling, runs = Sampling(temperature=1.0), 800
    expected = exact_pairs(backend("cpu"), prompt_of(5, 2), sampling) * runs
    assert chi_square_p(pairs_drawn(Leaning(CONFIG, random_tensors(CONFIG)), sampling, runs), expected) < 1e-6


@pytest.mark.parametrize("name", ["ngram", "mtp", "dflash", "cascade"])
def test_long_texts_in_which_drafts_rest_and_are_asked_again(name: str) -> None:
    """Dear enough to be put to rest, cheap enough to be tried again, and heard by turns."""
    on = backend("cpu")
    nodes: list[int] = []
    for seed in range(4):
        made = drafts(on, 30, seed)
        proposer = Steady(*made.values()) if name == "cascade" else Steady(made[name])
        scheduler, plainly = Scheduler(on, 500, proposer), Scheduler(on, 500)
        prompt = prompt_of(30, seed)
        for sampling in (Sampling(), SAMPLED):
            answer = run(plainly, prompt, sampling, max_tokens=100)
            for _ in range(2):  # once they are open, once they have to wait first
                on_step = lambda step: nodes.append(len(step.tree))  # noqa: E731
                assert run(scheduler, prompt, sampling, max_tokens=100, on_step=on_step) == answer
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
        budget = Budgeted(draft, CHEAP)
        held = Alone(budget)
        state = on.new_state(200)
        rows = on.prefill(state, text, draft.wants).features
        for start, end in ((0, 40), (40, heard), (heard, 90)):
            if rests and start == 40:
                budget.account.open, budget.account.credit, budget.account._needed = False, 0.0, 49.9 * REFILL
                assert held.rest == (heard - 40 if rows is not None else 50)
            held.observe(text[start:end], start, None if rows is None else rows[start:end], None)
            held.spent(end - start, 0.001 * (end - start), None)
        assert budget.account.open
        trees.append(draft.propose(held.memory.draft, Context([*text, text[30]], state, 10)))
    never, rested = trees
    assert never is not None
    assert rested is not None
    assert never.tokens.tolist() == rested.tokens.tolist()
    assert never.scores == pytest.approx(rested.scores, abs=1e-5)
