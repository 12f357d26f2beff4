"""The decode loop on small random models: drafts change nothing but speed, and requests end where they should."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_cases import (
    BACKEND,
    SAMPLED,
    VOCAB,
    Resting,
    RunsAhead,
    Scripted,
    backend_of,
    both_modes,
    chain,
    guessing,
    plain,
    prompt_of,
    run,
    star,
    states_equal,
    tokens_of,
    twins,
)
from random_models import SMALL
from warpsmith.backend.base import LOGITS
from warpsmith.backend.block_draft import GrowingTree, Verified
from warpsmith.backend.sampling import Sampling, choose
from warpsmith.backend.tree import MAX_NODES, Tree
from warpsmith.draft.base import Context
from warpsmith.engine.loop import Generation
from warpsmith.engine.scheduler import Scheduler
from warpsmith.errors import BadRequest

PROPOSERS: dict[str, Callable[[list[int]], Callable[[Context], Tree | None]]] = {
    "nothing": lambda truth: lambda context: None,
    "root only": lambda truth: lambda context: Tree.chain([context.root]),
    "all right": lambda truth: chain(truth, 7),
    "all right, longest": lambda truth: chain(truth, MAX_NODES - 1),
    "budget of one, right": lambda truth: chain(truth, 1),
    "budget of one, wrong": lambda truth: chain(truth, 1, offset=1),
    "all wrong": lambda truth: chain(truth, 7, offset=1),
    "all wrong, longest": lambda truth: chain(truth, MAX_NODES - 1, offset=1),
    "twins": twins,
    "star": lambda truth: star,
    "random": lambda truth: guessing(truth, 0.0, 20),
    "half right": lambda truth: guessing(truth, 0.5, 20),
    "mostly right, full": lambda truth: guessing(truth, 0.8, MAX_NODES),
    "now and then": lambda truth: lambda c: chain(truth, 3)(c) if len(c.ids) % 3 else None,
}


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", PROPOSERS)
@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_speculative_text_and_state_equal_plain(name: str, kind: str, sampling: Sampling) -> None:
    prompt, count = prompt_of(70), 24
    expected = plain(prompt, sampling, name, max_tokens=count)
    stepwise = Generation(
        Scheduler(backend_of(name), 256, Scripted(lambda context: None)), prompt, sampling, max_tokens=count
    )
    assert tokens_of(stepwise) == expected, "step by step equals decode"
    draft = Scripted(PROPOSERS[kind](prompt + expected))
    generation = Generation(Scheduler(backend_of(name), 256, draft), prompt, sampling, max_tokens=count)
    assert tokens_of(generation) == expected
    assert generation.sequence.committed == (prompt + expected)[:-1]
    assert states_equal(generation.sequence.state, stepwise.sequence.state)
    assert np.array_equal(generation.sequence.draft.rows, stepwise.sequence.draft.rows), (
        "the draft sees the accepted nodes' rows, no others"
    )


several_turns = given(
    st.integers(0, 10_000),
    st.integers(1, 150),
    st.integers(1, MAX_NODES),
    st.sampled_from([0.3, 0.7, 1.0]),
    st.booleans(),
)


@settings(max_examples=8, deadline=None)
@several_turns
def test_any_tree_any_prompt_over_several_turns(seed: int, length: int, nodes: int, right: float, greedy: bool) -> None:
    check_turns("reference", seed, length, nodes, right, greedy)


@settings(max_examples=30, deadline=None)
@several_turns
def test_so_it_is_on_the_cpu(seed: int, length: int, nodes: int, right: float, greedy: bool) -> None:
    check_turns("cpu", seed, length, nodes, right, greedy)


def check_turns(name: str, seed: int, length: int, nodes: int, right: float, greedy: bool) -> None:
    """Turns that continue the answer, drop it, or start anew: snapshots and live states in both modes agree."""
    rng = np.random.default_rng(seed)
    sampling = Sampling() if greedy else Sampling(temperature=1.0, seed=seed)
    plainly = Scheduler(backend_of(name), 400)
    truth: list[int] = []
    drafted = Scheduler(
        backend_of(name), 400, Resting(lambda context: guessing(truth, right, nodes, len(context.ids))(context), seed)
    )
    prompt = prompt_of(length, seed)
    for turn in range(3):
        count = int(rng.integers(1, 12))
        first = Generation(plainly, prompt, sampling, max_tokens=count)
        answer = [token for tokens in first for token in tokens]
        truth = prompt + answer
        second = Generation(drafted, prompt, sampling, max_tokens=count)
        assert [token for tokens in second for token in tokens] == answer
        assert first.stats.cached_tokens == second.stats.cached_tokens
        assert states_equal(first.sequence.state, second.sequence.state)
        following = prompt_of(int(rng.integers(1, 40)), seed + turn + 1)
        prompt = [prompt + answer + following, prompt + following, following][rng.integers(3)]


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_a_proposer_that_rests_is_told_of_everything(sampling: Sampling) -> None:
    """Tokens decoded while it rested: observed without rows, once, in order, and counted with their time."""
    prompt = prompt_of(20, 2)
    expected = plain(prompt, sampling, max_tokens=60)
    for backend in (BACKEND, RunsAhead(SMALL, BACKEND.tensors)):
        draft = Resting(chain(prompt + expected, 4), seed=3)
        scheduler = Scheduler(backend, 256, draft)
        generation = Generation(scheduler, prompt, sampling, max_tokens=60)
        assert tokens_of(generation) == expected
        assert generation.sequence.draft.tokens == generation.sequence.committed
        assert sum(tokens for tokens, _, _ in draft.told) == 59
        resting = [tokens for tokens, _, forward in draft.told if forward is None]
        assert len(resting) > 2
        assert max(resting) > 1, "in bursts"
        assert all(0 < (forward or 0) < seconds for _, seconds, forward in draft.told if forward is not None)
        assert sum(seconds for _, seconds, _ in draft.told) == pytest.approx(generation.stats.decode_seconds)


@pytest.mark.parametrize("leave", [1, 4, 9, 17])
def test_leaving_while_a_draft_rests(leave: int) -> None:
    """The consumer goes away in the middle of a burst: what was given out is committed, observed, and goes on."""
    prompt = prompt_of(20, 2)
    expected = plain(prompt, max_tokens=40)
    for backend in (BACKEND, RunsAhead(SMALL, BACKEND.tensors)):
        draft = Resting(chain(prompt + expected, 2), seed=leave)
        scheduler = Scheduler(backend, 256, draft)
        generation = Generation(scheduler, prompt, max_tokens=40)
        runs, taken = iter(generation), list[int]()
        while len(taken) < leave:
            taken += next(runs)
        runs.close()
        assert taken == expected[: len(taken)]
        assert generation.sequence.draft.tokens == generation.sequence.committed == (prompt + taken)[:-1]
        follow_up = [*prompt, *taken, 1, 2]
        assert run(scheduler, follow_up, max_tokens=5) == plain(follow_up, max_tokens=5)


@pytest.mark.parametrize("place", [0, 1, 5, 11, 17])
def test_a_stop_id_ends_the_text_before_the_state_advances(place: int) -> None:
    prompt = prompt_of(20, 3)
    truth = plain(prompt, SAMPLED, max_tokens=30)
    place = truth.index(truth[place])  # where it first occurs
    for generation in both_modes(prompt, SAMPLED, max_tokens=30, stop_ids=frozenset([truth[place]])):
        assert tokens_of(generation) == truth[: place + 1]
        assert generation.finish_reason == "stop"
        assert generation.stats.generated_tokens == place + 1
        assert generation.sequence.committed == prompt + truth[:place]


def test_a_stop_id_ends_greedy_text_too() -> None:
    prompt = prompt_of(20, 3)
    truth = plain(prompt, max_tokens=30)
    stop = truth[9]
    place = truth.index(stop)
    for generation in both_modes(prompt, max_tokens=30, stop_ids=frozenset([stop])):
        assert tokens_of(generation) == truth[: place + 1]
        assert generation.finish_reason == "stop"
        assert generation.sequence.committed == prompt + truth[:place]


@pytest.mark.parametrize("place", [0, 4, 13])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_until_sees_every_token_once_and_ends_the_text(place: int, sampling: Sampling) -> None:
    prompt = prompt_of(20, 4)
    truth = plain(prompt, sampling, max_tokens=30)
    seen: list[int] = []

    def until(token: int) -> bool:
        seen.append(token)
        return len(seen) == place + 1

    for generation in both_modes(prompt, sampling, max_tokens=30, until=until):
        seen.clear()
        assert tokens_of(generation) == seen == truth[: place + 1]
        assert generation.finish_reason == "stop"
        assert generation.sequence.committed == prompt + truth[:place]


@pytest.mark.parametrize("count", [1, 2, 7, 11, 12, 13])
def test_max_tokens_inside_an_accepted_run(count: int) -> None:
    prompt = prompt_of(10, 5)
    truth = plain(prompt, max_tokens=20)
    for generation in both_modes(prompt, max_tokens=count):
        assert tokens_of(generation) == truth[:count]
        assert generation.finish_reason == "length"
        assert generation.sequence.committed == (prompt + truth[:count])[:-1]


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_a_full_context_ends_with_length(sampling: Sampling) -> None:
    prompt = prompt_of(10, 6)
    truth = plain(prompt, sampling, max_tokens=30)
    for generation in both_modes(prompt, sampling, context=32):
        assert tokens_of(generation) == truth[:22]
        assert generation.finish_reason == "length"
        assert generation.sequence.state.length == 31


def test_a_draft_deeper_than_the_room_that_is_left_is_cut() -> None:
    prompt = prompt_of(10, 6)
    truth = plain(prompt, max_tokens=22)
    for right in (0.0, 1.0):
        scheduler = Scheduler(BACKEND, 32, Scripted(guessing(prompt + truth, right, MAX_NODES)))
        assert run(scheduler, prompt) == truth


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ([], {}, "empty"),
        ([1] * 32, {}, "no room"),
        ([VOCAB], {}, "ids"),
        ([-1], {}, "ids"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"sampling": Sampling(top_p=2)}, "top_p"),
        ([1], {"sampling": Sampling(logit_bias={VOCAB: 1})}, "logit_bias"),
    ],
)
def test_impossible_requests_are_refused_before_anything_runs(prompt: list[int], options: dict, words: str) -> None:
    scheduler = Scheduler(BACKEND, 32)
    with pytest.raises(BadRequest, match=words):
        Generation(scheduler, prompt, **options)
    assert not scheduler.waiting


def test_a_draft_that_loses_the_root_is_a_mistake_not_a_text() -> None:
    scheduler = Scheduler(BACKEND, 64, Scripted(lambda c: Tree.chain([(c.root + 1) % VOCAB, 3])))
    with pytest.raises(ValueError, match="root"):
        run(scheduler, [1, 2, 3], max_tokens=4)


@pytest.mark.parametrize("last", [12, -1])
def test_every_token_is_chosen_from_its_own_history_and_position(last: int) -> None:
    """Against a loop with nothing clever in it. The first token after the prompt is sampled like the others."""
    prompt = prompt_of(30, 7)
    sampling = Sampling(temperature=1.2, presence_penalty=1.0, repeat_penalty=1.3, repeat_last_n=last, seed=11)
    state = BACKEND.new_state(256)
    logits = BACKEND.prefill(state, prompt, LOGITS).logits.numpy()
    ids = list(prompt)
    for _ in range(15):
        assert logits is not None
        ids.append(choose(logits[-1], sampling, ids, len(ids)))
        logits = BACKEND.forward([(state, Tree.chain(ids[-1:]))], LOGITS).logits.numpy()
        BACKEND.commit(state, [0])
    for generation in both_modes(prompt, sampling, max_tokens=15):
        assert tokens_of(generation) == ids[30:]
    first = {run(Scheduler(BACKEND, 64), prompt, Sampling(temperature=1.5, seed=s), max_tokens=1)[0] for s in range(12)}
    assert len(first) > 3


@pytest.mark.parametrize("sampling", [SAMPLED, Sampling(repeat_penalty=1.3, repeat_last_n=-1), Sampling()])
@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_a_backend_decodes_what_the_sampler_chooses(name: str, sampling: Sampling) -> None:
    """Its own loop against forward, choose, commit; from the whole text or from what the penalties look at."""
    backend, text = backend_of(name), prompt_of(30, 9)
    state = backend.new_state(64)
    backend.prefill(state, text[:-1])
    start, expected = backend.snapshot(state), list(text)
    for _ in range(20):
        logits = backend.forward([(state, Tree.chain(expected[-1:]))], LOGITS).logits.numpy()
        backend.commit(state, [0])
        assert logits is not None
        expected.append(choose(logits[0], sampling, expected, len(expected)))
    for history in (text, text[-10:]) if sampling.repeat_last_n > 0 else (text,):
        backend.restore(state, start)
        assert list(backend.decode(state, text[-1], 20, frozenset(), sampling, history)) == expected[30:]
        assert state.length == 49
    backend.restore(state, start)
    end = expected.index(expected[38], 30)
    stop = frozenset({expected[38]})
    assert list(backend.decode(state, text[-1], 20, stop, sampling, text)) == expected[30 : end + 1]


def test_penalties_reach_greedy_decoding() -> None:
    prompt = prompt_of(12, 8)
    free = plain(prompt, max_tokens=40)
    penalised = plain(prompt, Sampling(presence_penalty=100.0, repeat_last_n=-1), max_tokens=40)
    assert len({*prompt, *penalised}) == len({*prompt}) + 40, "no token twice"
    assert len({*free}) < 40, "the model repeats itself when left alone"


def test_stats_tell_what_happened() -> None:
    prompt = prompt_of(20)
    truth = prompt + plain(prompt, max_tokens=14)
    generation = Generation(Scheduler(BACKEND, 64, Scripted(chain(truth, 3))), prompt, max_tokens=14)
    tokens_of(generation)
    stats = generation.stats
    assert (stats.mode, stats.speculation_off) == ("scripted", None)
    # the prefill gives one token; each step then gives four, and the last one is cut to one by max_tokens
    assert (stats.generated_tokens, stats.steps, stats.histogram) == (14, 4, [1, 0, 0, 3])
    assert stats.drafted_tokens == 9, "nothing is drafted beyond max_tokens"
    assert stats.acceptance_length == 13 / 4
    assert min(stats.prefill_seconds, stats.draft_seconds, stats.verify_seconds, stats.commit_seconds) > 0
    assert stats.decode_seconds >= stats.draft_seconds + stats.verify_seconds + stats.commit_seconds - 1e-6

    generation = Generation(Scheduler(BACKEND, 64), prompt, SAMPLED, max_tokens=5)
    tokens_of(generation)
    assert (generation.stats.mode, generation.stats.speculation_off) == ("plain", "no draft")
    assert (generation.stats.steps, generation.stats.histogram, generation.stats.seed) == (4, [4], SAMPLED.seed)
    assert generation.stats.device == "reference"


class GrownRoot(GrowingTree):
    """A tree of one node that says how long a device took for its parts: a tenth of a second in all."""

    nodes = 1

    def __init__(self, root: int) -> None:
        self.tree = Tree.root(root)

    def verify(self, state, want, sampling, history, stop) -> Verified:
        output = BACKEND.forward([(state, self.tree)], want)
        path, decided = BACKEND.verify(state, self.tree, sampling, history)
        tokens, parents = self.tree.tokens, self.tree.parents
        return Verified(
            tokens, parents, np.zeros(1), self.tree, output, path, decided,
            draft_seconds=0.04, tree_seconds=0.01, forward_seconds=0.03, commit_seconds=0.02,
        )  # fmt: skip

    def instead(self, tree: Tree) -> None:
        raise NotImplementedError


def test_what_the_host_does_while_the_device_drafts_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of a step are the device's, and what is left of the step besides them."""
    look = 0.025  # seconds that every look at the clock takes
    clock = itertools.count(step=look)
    scripted = Scripted(lambda context: GrownRoot(context.root))  # type: ignore[arg-type, return-value]
    generation = Generation(Scheduler(BACKEND, 64, scripted), prompt_of(5), max_tokens=4)
    generation.unseen = True
    monkeypatch.setattr("warpsmith.engine.loop.perf_counter", lambda: next(clock))
    monkeypatch.setattr("warpsmith.engine.scheduler.perf_counter", lambda: next(clock))
    tokens_of(generation)
    stats = generation.stats
    assert stats.steps == 3, "with nothing to guess in the last one, which takes a look a part"
    parts = stats.draft_seconds, stats.forward_seconds, stats.commit_seconds
    assert np.allclose(parts, (2 * 0.05 + look, 2 * 0.03 + look, 2 * 0.02 + look))
    assert stats.draft_seconds + stats.verify_seconds + stats.commit_seconds <= stats.decode_seconds
