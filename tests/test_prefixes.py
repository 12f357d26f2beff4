"""Requests that begin alike, go back, are left or interrupted: what was computed is used again, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_cases import (
    BACKEND,
    SAMPLED,
    VOCAB,
    RunsAhead,
    Scripted,
    backend_of,
    both_modes,
    chain,
    plain,
    prompt_of,
    run,
    states_equal,
    tokens_of,
)
from random_models import SMALL
from warpsmith.backend.base import PREFILL_CHUNK, State
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.backend.sampling import Sampling
from warpsmith.engine.conversation import MAX_SNAPSHOTS, Conversation
from warpsmith.engine.loop import Generation
from warpsmith.errors import BadRequest


def test_the_answer_is_continued_from_the_live_state() -> None:
    conversation = Conversation(BACKEND, 256)
    prompt = prompt_of(20)
    answer = run(conversation, prompt, max_tokens=6)
    generation = Generation(conversation, prompt + answer + [1, 2, 3], max_tokens=4)
    tokens_of(generation)
    assert generation.stats.cached_tokens == 25, "all but the last token, which was never run"
    assert generation.stats.prompt_tokens == 29


def test_a_shared_beginning_is_not_computed_again_and_bits_agree() -> None:
    prompt = prompt_of(200)
    conversation = Conversation(BACKEND, 400)
    run(conversation, prompt, max_tokens=6)
    for other in (prompt, [*prompt[:190], 1, 2, 3, 4], prompt[:128] + prompt_of(90, 9)):
        generation = Generation(conversation, other, max_tokens=5)
        fresh = Conversation(BACKEND, 400)
        assert tokens_of(generation) == run(fresh, other, max_tokens=5)
        assert generation.stats.cached_tokens == 128
        assert states_equal(conversation.sequence.state, fresh.sequence.state)
    generation = Generation(conversation, [*prompt[:127], 5], max_tokens=2)
    tokens_of(generation)
    assert generation.stats.cached_tokens == 0, "a recurrent state cannot be cut short"


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 150), st.integers(0, 150), st.integers(0, 100), st.booleans())
def test_on_the_cpu_all_that_is_known_to_stay_is_reused_and_bits_agree(
    length: int, kept: int, seed: int, drafted: bool
) -> None:
    """Wherever the next prompt leaves this one: its past is there, to the bit that a new conversation would have."""
    cpu, prompt, kept = backend_of("cpu"), prompt_of(length, seed), min(kept, length)
    conversation = Conversation(cpu, 400, Scripted(lambda context: None) if drafted else None)
    answer = tokens_of(Generation(conversation, prompt, max_tokens=5, kept=kept))
    other = prompt[:kept] + [(t + 1) % VOCAB for t in prompt[kept : kept + 1]] + prompt_of(20, seed + 1)
    if kept == length:
        other = prompt + answer + prompt_of(20, seed + 1)
    again = Generation(conversation, other, max_tokens=5)
    fresh = Conversation(cpu, 400)
    assert tokens_of(again) == run(fresh, other, max_tokens=5)
    assert again.stats.cached_tokens == (length + 4 if kept == length else kept)
    assert states_equal(conversation.sequence.state, fresh.sequence.state)


def test_another_request_between_does_not_lose_an_answer_that_stays() -> None:
    for stays in (True, False):
        conversation, prompt = Conversation(BACKEND, 256), prompt_of(30)
        answer = tokens_of(Generation(conversation, prompt, max_tokens=6, kept=30 if stays else None))
        run(conversation, prompt_of(20, 5), max_tokens=2)
        generation = Generation(conversation, prompt + answer + [1, 2], max_tokens=2)
        tokens_of(generation)
        assert generation.stats.cached_tokens == (35 if stays else 0)


def test_where_prompts_part_a_snapshot_is_left() -> None:
    """Two requests with the same instructions: the third does not compute them again."""
    instructions = prompt_of(150)
    conversation = Conversation(BACKEND, 400)
    cached = []
    for seed in range(3):
        generation = Generation(conversation, instructions + prompt_of(100, 20 + seed), max_tokens=2)
        tokens_of(generation)
        cached.append(generation.stats.cached_tokens)
    assert cached == [0, 0, 128]


def test_snapshots_are_bounded_and_the_least_used_go_first() -> None:
    conversation = Conversation(BACKEND, 256)
    prompts = [prompt_of(100, seed) for seed in range(MAX_SNAPSHOTS + 2)]

    def cached(prompt: list[int]) -> int:
        generation = Generation(conversation, prompt, max_tokens=1)
        tokens_of(generation)
        return generation.stats.cached_tokens

    for prompt in prompts:
        assert cached(prompt) == 0
        assert cached(prompts[0]) == PREFILL_CHUNK, "used all the time, never dropped"
        assert len(conversation._saved) <= MAX_SNAPSHOTS
    assert cached(prompts[-1]) == PREFILL_CHUNK
    assert cached(prompts[1]) == 0, "long ago"


def test_long_prompts_are_prefilled_in_pieces_without_changing_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(230)
    whole = Conversation(BACKEND, 256)
    expected = run(whole, prompt, max_tokens=3)
    monkeypatch.setattr("warpsmith.engine.conversation.PIECE", 64)
    pieces = Conversation(BACKEND, 256, Scripted(lambda context: None))
    assert run(pieces, prompt, max_tokens=3) == expected
    assert states_equal(whole.sequence.state, pieces.sequence.state)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_a_consumer_may_leave_at_any_time(sampling: Sampling) -> None:
    prompt = prompt_of(20, 3)
    for conversation, generation in both_modes(prompt, sampling, max_tokens=30):
        runs = iter(generation)
        taken = [token for _ in range(3) for token in next(runs)]
        runs.close()  # type: ignore[attr-defined]
        assert conversation.sequence.committed == (prompt + taken)[:-1]
        follow_up = Generation(conversation, [*prompt, *taken, 1, 2], sampling, max_tokens=3)
        tokens_of(follow_up)
        assert follow_up.stats.cached_tokens == len(prompt) + len(taken) - 1


class Interrupted(ReferenceBackend):
    """Ctrl-C in the middle of a change: the call does its work and the news of it is lost."""

    name = "interrupted"
    countdown = -1
    where = ""

    def _count(self, where: str) -> None:
        if where == self.where:
            self.countdown -= 1
            if self.countdown == 0:
                raise KeyboardInterrupt

    def prefill(self, state: State, *args: Any, **kwargs: Any) -> Any:
        output = super().prefill(state, *args, **kwargs)
        self._count("prefill")
        return output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._count("forward")
        return super().forward(*args, **kwargs)

    def commit(self, state: State, path: Sequence[int]) -> None:
        super().commit(state, path)
        state.length -= 1  # half done
        self._count("commit")
        state.length += 1


@pytest.mark.parametrize("where", ["prefill", "forward", "commit"])
@pytest.mark.parametrize("when", [1, 2])
@pytest.mark.parametrize("drafted", [False, True])
def test_an_interrupted_request_leaves_a_conversation_that_goes_on(where: str, when: int, drafted: bool) -> None:
    prompt = prompt_of(100)
    expected = plain(prompt, max_tokens=20)
    backend = Interrupted(SMALL, BACKEND.tensors)
    draft = Scripted(chain(prompt + expected, 4)) if drafted else None
    conversation = Conversation(backend, 256, draft)
    backend.where, backend.countdown = where, when
    with pytest.raises(KeyboardInterrupt):
        run(conversation, prompt, max_tokens=20)
    backend.where = ""
    assert run(conversation, prompt, max_tokens=20) == expected
    fresh = Conversation(BACKEND, 256)
    run(fresh, prompt, max_tokens=20)
    assert states_equal(conversation.sequence.state, fresh.sequence.state)


def test_a_backend_that_runs_ahead_comes_back_when_the_text_ends() -> None:
    prompt = prompt_of(30)
    truth = plain(prompt, max_tokens=20)
    conversation = Conversation(RunsAhead(SMALL, BACKEND.tensors), 256)
    seen: list[int] = []

    def until(token: int) -> bool:
        seen.append(token)
        return len(seen) == 8

    assert run(conversation, prompt, max_tokens=20, until=until) == truth[:8]
    assert conversation.sequence.committed == prompt + truth[:7]
    # another request while this one stands open goes on from what was given out, not from what was run ahead
    expected = Conversation(BACKEND, 256)
    answers = []
    for each in (conversation, expected):
        runs = iter(Generation(each, prompt, max_tokens=20))
        taken = [token for _ in range(5) for token in next(runs)]
        follow_up = Generation(each, [*prompt, *taken, 1, 2], max_tokens=6)
        answers.append(tokens_of(follow_up))
        assert follow_up.stats.cached_tokens == len(prompt) + 4
        with pytest.raises(BadRequest, match="Another request"):
            next(runs)
    assert answers[0] == answers[1]
    assert states_equal(conversation.sequence.state, expected.sequence.state)


def test_an_old_request_cannot_go_on_once_another_has_begun() -> None:
    for sampling in (Sampling(), SAMPLED):
        conversation = Conversation(BACKEND, 64)
        old = iter(Generation(conversation, [1, 2, 3], sampling, max_tokens=9))
        next(old)
        expected = run(conversation, [4, 5], max_tokens=5)
        with pytest.raises(BadRequest, match="Another request"):
            next(old)
        assert run(conversation, [4, 5], max_tokens=5) == expected
