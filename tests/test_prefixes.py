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
from warpsmith.backend.base import State
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.backend.sampling import Sampling
from warpsmith.engine.loop import Generation
from warpsmith.engine.scheduler import Scheduler


def cached(scheduler: Scheduler, prompt: list[int], **options: Any) -> int:
    """How much of a request came from earlier ones; its text and its state are those of a request of its own."""
    generation = Generation(scheduler, prompt, **{"max_tokens": 5} | options)
    fresh = Generation(Scheduler(scheduler.backend, scheduler.context), prompt, **{"max_tokens": 5} | options)
    assert tokens_of(generation) == tokens_of(fresh)
    assert states_equal(generation.sequence.state, fresh.sequence.state)
    return generation.stats.cached_tokens


@pytest.mark.parametrize("on", ["cpu", "reference"])
def test_answers_are_gone_on_from_where_that_changes_no_bit(on: str) -> None:
    scheduler, prompt = Scheduler(backend_of(on), 256), prompt_of(100)
    answer = run(scheduler, prompt, max_tokens=6)
    expected = 105 if on == "cpu" else 64
    assert cached(scheduler, prompt + answer + [1, 2, 3]) == expected, "all but the last token, which was never run"


def test_a_shared_beginning_is_not_computed_again_and_bits_agree() -> None:
    prompt = prompt_of(200)
    scheduler = Scheduler(BACKEND, 400)
    run(scheduler, prompt, max_tokens=6)
    for other in (prompt, [*prompt[:190], 1, 2, 3, 4], prompt[:128] + prompt_of(90, 9)):
        assert cached(scheduler, other) == 128
    assert cached(scheduler, [*prompt[:127], 5]) == 0, "a recurrent state cannot be cut short"


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 150), st.integers(0, 150), st.integers(0, 100), st.booleans())
def test_on_the_cpu_all_that_is_known_to_stay_is_reused_and_bits_agree(
    length: int, kept: int, seed: int, drafted: bool
) -> None:
    """Wherever the next prompt leaves this one: its past is there, to the bit that a new sequence would have."""
    cpu, prompt, kept = backend_of("cpu"), prompt_of(length, seed), min(kept, length)
    scheduler = Scheduler(cpu, 400, Scripted(lambda context: None) if drafted else None)
    answer = run(scheduler, prompt, max_tokens=5, kept=kept)
    other = prompt[:kept] + [(t + 1) % VOCAB for t in prompt[kept : kept + 1]] + prompt_of(20, seed + 1)
    if kept == length:
        other = prompt + answer + prompt_of(20, seed + 1)
    assert cached(scheduler, other) == (length + 4 if kept == length else kept)


def test_an_answer_that_the_next_prompt_leaves_out_is_not_saved() -> None:
    for kept, saved in ((30, 34), (20, 20), (None, 34)):
        scheduler, prompt = Scheduler(backend_of("cpu"), 256), prompt_of(30)
        answer = run(scheduler, prompt, max_tokens=5, kept=kept)
        assert cached(scheduler, prompt + answer + [1, 2]) == saved


def test_where_prompts_part_a_snapshot_is_left() -> None:
    """Two requests with the same instructions: the third does not compute them again."""
    instructions, scheduler = prompt_of(150), Scheduler(BACKEND, 400)
    prompts = [instructions + prompt_of(100, 20 + seed) for seed in range(3)]
    assert [cached(scheduler, prompt) for prompt in prompts] == [0, 0, 128]


def test_long_prompts_can_be_gone_back_into() -> None:
    """At 2048 tokens, at twice as many, and so on."""
    prompt, scheduler = prompt_of(5000), Scheduler(backend_of("cpu"), 5100)
    run(scheduler, prompt, max_tokens=1, kept=0)
    for place, expected in ((4900, 4096), (4095, 2048), (2047, 0)):
        assert cached(scheduler, [*prompt[:place], 1, 2], max_tokens=1) == expected


def test_snapshots_keep_to_their_budget_and_the_least_used_go_first() -> None:
    states, cpu = 4, backend_of("cpu")
    budget = cpu.snapshot_bytes(0) + states * (cpu.snapshot_bytes(100) + 400)
    scheduler = Scheduler(cpu, 256, cache_bytes=budget)
    prompts = [prompt_of(100, seed) for seed in range(states + 2)]

    def reused(prompt: list[int]) -> bool:
        tokens = cached(scheduler, prompt, max_tokens=1, kept=99)
        assert tokens in (0, 99)
        assert scheduler.prefixes.saved.nbytes <= scheduler.prefixes.saved.budget < budget
        return tokens > 0

    for prompt in prompts:
        assert not reused(prompt)
        assert reused(prompts[0]), "used all the time, never dropped"
    assert reused(prompts[-1])
    assert not reused(prompts[1]), "long ago"
    none = Scheduler(cpu, 256, cache_bytes=0)
    assert [cached(none, prompts[0]) for _ in range(2)] == [0, 0]


def test_what_a_draft_remembers_is_in_the_budget() -> None:
    prompt = prompt_of(100)
    with_draft, without = (Scheduler(backend_of("cpu"), 256, draft) for draft in (Scripted(lambda context: None), None))
    for scheduler in (with_draft, without):
        run(scheduler, prompt, max_tokens=1, kept=50)
    rows = 50 * 3 * SMALL.hidden * 4
    assert with_draft.prefixes.saved.nbytes == without.prefixes.saved.nbytes + rows


def test_long_prompts_are_prefilled_in_pieces_without_changing_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, seen = prompt_of(230), list[int]()
    monkeypatch.setattr("warpsmith.engine.scheduler.LONGEST_PIECE", 230)
    scheduler = Scheduler(BACKEND, 256)
    scheduler._piece = 230
    whole = Generation(scheduler, prompt, max_tokens=3, kept=0)
    expected = tokens_of(whole)
    monkeypatch.setattr("warpsmith.engine.scheduler.LONGEST_PIECE", 64)
    scheduler = Scheduler(BACKEND, 256, Scripted(lambda context: None))
    pieces = Generation(scheduler, prompt, max_tokens=3)
    scheduler.add(pieces)
    while not pieces.prefilled:
        scheduler.step()
        seen.append(pieces.sequence.state.length)
    while pieces.finish_reason is None:
        scheduler.step()
    assert [token for tokens in pieces.runs for token in tokens] == expected
    assert seen == [64, 128, 192, 230]
    assert states_equal(whole.sequence.state, pieces.sequence.state)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_a_consumer_may_leave_at_any_time(sampling: Sampling) -> None:
    prompt = prompt_of(20, 3)
    for generation in both_modes(prompt, sampling, on="cpu", max_tokens=30):
        runs = iter(generation)
        taken = [token for _ in range(3) for token in next(runs)]
        runs.close()
        assert generation.sequence.committed == (prompt + taken)[:-1]
        follow_up = Generation(generation.scheduler, [*prompt, *taken, 1, 2], sampling, max_tokens=3)
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
def test_after_an_interrupt_the_next_request_is_right(where: str, when: int, drafted: bool) -> None:
    prompt = prompt_of(100)
    expected = plain(prompt, max_tokens=20)
    backend = Interrupted(SMALL, BACKEND.tensors)
    draft = Scripted(chain(prompt + expected, 4)) if drafted else None
    scheduler = Scheduler(backend, 256, draft)
    backend.where, backend.countdown = where, when
    with pytest.raises(KeyboardInterrupt):
        run(scheduler, prompt, max_tokens=20)
    backend.where = ""
    again, fresh = (Generation(each, prompt, max_tokens=20) for each in (scheduler, Scheduler(BACKEND, 256)))
    assert tokens_of(again) == tokens_of(fresh) == expected
    assert states_equal(again.sequence.state, fresh.sequence.state)


def test_a_backend_that_runs_ahead_comes_back_when_the_text_ends() -> None:
    prompt = prompt_of(30)
    truth = plain(prompt, max_tokens=20)
    scheduler = Scheduler(RunsAhead(SMALL, BACKEND.tensors), 256, parallel=2)
    seen: list[int] = []

    def until(token: int) -> bool:
        seen.append(token)
        return len(seen) == 8

    generation = Generation(scheduler, prompt, max_tokens=20, until=until)
    assert tokens_of(generation) == truth[:8]
    assert generation.sequence.committed == prompt + truth[:7]
    # another request goes on from what was given out, not from what was run ahead
    first = Generation(scheduler, prompt, max_tokens=20)
    runs = iter(first)
    taken = [token for _ in range(5) for token in next(runs)]
    other = prompt_of(20, 4)
    assert run(scheduler, other, max_tokens=6) == plain(other, max_tokens=6)
    assert taken + [token for tokens in runs for token in tokens] == truth


@pytest.mark.parametrize("parallel", [1, 2])
def test_requests_that_stand_open_do_not_hurt_each_other(parallel: int) -> None:
    for sampling in (Sampling(), SAMPLED):
        scheduler = Scheduler(BACKEND, 64, parallel=parallel)
        old = iter(Generation(scheduler, [1, 2, 3], sampling, max_tokens=9))
        taken = next(old)
        assert run(scheduler, [4, 5], max_tokens=5) == plain([4, 5], max_tokens=5)
        assert taken + [token for tokens in old for token in tokens] == plain([1, 2, 3], sampling, max_tokens=9)
