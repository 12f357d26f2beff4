"""Many requests at a time: nobody is starved, and what fails or leaves hurts nobody."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from engine_cases import BACKEND, Heard, Scripted, backend_of, guessing, plain, prompt_of, run
from random_models import SMALL
from warpsmith.backend.base import Backend, Batch, Output, State, Want
from warpsmith.backend.finite import NOT_FINITE
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.backend.tree import MAX_NODES
from warpsmith.draft.base import Context
from warpsmith.engine.capacity import CACHE_BYTES, plan
from warpsmith.engine.loop import Generation
from warpsmith.engine.scheduler import Scheduler
from warpsmith.errors import BadFile, BadRequest, DoesNotFit

FOR_EVER = 1e9  # seconds

# Who computes when


def generation(scheduler: Scheduler, length: int = 10, seed: int = 0, **options: Any) -> Generation:
    made = Generation(scheduler, prompt_of(length, seed), **{"max_tokens": 30} | options)
    scheduler.add(made)
    return made


def decided(generations: list[Generation]) -> list[int]:
    return [each.stats.generated_tokens for each in generations]


def test_requests_are_admitted_in_order_and_stay() -> None:
    scheduler = Scheduler(backend_of("cpu"), 256, parallel=2)
    made = [generation(scheduler, seed=seed, max_tokens=3 + seed) for seed in range(6)]
    order: list[Generation] = []
    while any(each.finish_reason is None for each in made):
        before = [*scheduler.prefilling, *scheduler.running]
        scheduler.step()
        now = [*scheduler.prefilling, *scheduler.running]
        assert all(each in now or each.finish_reason for each in before), "nobody is turned out"
        order += [each for each in made if each.prefilled and each not in order]
    assert order == made


def test_everybody_who_runs_gets_a_token_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpsmith.engine.scheduler.LONGEST_PIECE", 64)
    monkeypatch.setattr("warpsmith.engine.scheduler.UNSEEN_SECONDS", 0.0)
    scheduler = Scheduler(backend_of("cpu"), 256, parallel=4)
    made = [generation(scheduler, 60, seed) for seed in range(4)]
    for _ in range(5):
        scheduler.step()
    assert decided(made) == [4, 3, 2, 1], "64 tokens of prompts a step, and a token for those who are past theirs"
    scheduler.step()
    assert decided(made) == [5, 4, 3, 2]


def test_several_get_as_many_tokens_a_step_as_are_soon_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to where the first of them ends or has to be looked at; while a prompt waits it is one."""
    monkeypatch.setattr("warpsmith.engine.scheduler.LONGEST_PIECE", 64)
    monkeypatch.setattr("warpsmith.engine.scheduler.UNSEEN_SECONDS", FOR_EVER)
    scheduler = Scheduler(backend_of("cpu"), 256, parallel=3)
    made = [generation(scheduler, seed=seed, max_tokens=count) for seed, count in enumerate((10, 20, 30))]
    scheduler.step()
    scheduler.step()
    assert decided(made) == [2, 2, 2], "the first pass tells how long one takes"
    scheduler.step()
    assert decided(made) == [10, 10, 10]
    assert made[0].finish_reason == "length"
    late = generation(scheduler, 150, max_tokens=9)
    scheduler.step()
    scheduler.step()
    assert decided([*made[1:], late]) == [12, 12, 0]
    scheduler.step()
    assert decided([*made[1:], late]) == [13, 13, 1], "its prompt is done"
    scheduler.step()
    assert decided([*made[1:], late]) == [20, 20, 8]
    assert [each.stats.steps for each in (*made[1:], late)] == [19, 19, 7]
    assert [each.stats.histogram for each in (*made[1:], late)] == [[19], [19], [7]]


@pytest.mark.parametrize("options", [{"until": lambda token: False}, {"on_logits": lambda row, token: None}])
def test_whoever_looks_at_every_token_is_asked_before_the_next(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warpsmith.engine.scheduler.UNSEEN_SECONDS", FOR_EVER)
    scheduler = Scheduler(backend_of("cpu"), 256, parallel=2)
    made = [generation(scheduler), generation(scheduler, seed=1, **options)]
    for tokens in range(1, 6):
        scheduler.step()
        assert decided(made) == [tokens, tokens]


def test_a_text_that_ends_holds_nobody_up_and_nothing_is_run_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpsmith.engine.scheduler.UNSEEN_SECONDS", FOR_EVER)
    backend = backend_of("cpu")
    alone = [plain(prompt_of(10, seed), on="cpu", max_tokens=30) for seed in range(2)]
    stop = frozenset({alone[0][12]})
    ends = [next((i + 1 for i, token in enumerate(text) if token in stop), 30) for text in alone]
    scheduler = Scheduler(backend, 256, parallel=2)
    made = [generation(scheduler, seed=seed, stop_ids=stop) for seed in range(2)]
    while scheduler.running or scheduler.prefilling or scheduler.waiting:
        scheduler.step()
    assert [[token for run in each.runs for token in run] for each in made] == [
        text[:end] for text, end in zip(alone, ends, strict=True)
    ]
    assert [each.finish_reason for each in made] == ["stop" if end < 30 else "length" for end in ends]


def test_tokens_before_numbers_that_are_not_finite_are_told() -> None:
    scheduler = Scheduler(backend_of("cpu"), 256, parallel=2)
    made = generation(scheduler)
    scheduler.step()
    made.runs.clear()
    with pytest.raises(BadFile, match="not finite"):
        made.accept_run([5, 6, NOT_FINITE])
    assert list(made.runs) == [[5, 6]]


def test_short_prompts_need_not_wait_for_a_step_each() -> None:
    scheduler = Scheduler(backend_of("cpu"), 256, parallel=3)
    made = [generation(scheduler, 10, seed) for seed in range(3)]
    scheduler.step()
    assert decided(made) == [1, 1, 1]


class CatchingUp(Scripted):
    """Knows for which texts there was time to work through the prompt."""

    def __init__(self) -> None:
        super().__init__(lambda context: None)
        self.caught_up: list[int] = []

    def catch_up(self, memory: Heard, state: State) -> None:
        self.caught_up.append(len(memory.tokens))


def test_a_draft_works_through_a_prompt_only_where_nobody_else_waits() -> None:
    proposer = CatchingUp()
    scheduler = Scheduler(backend_of("cpu"), 256, proposer, parallel=3)
    alone = generation(scheduler, 20)
    scheduler.step()
    assert proposer.caught_up == [4, 20]
    made = [alone, *(generation(scheduler, 20, seed) for seed in (1, 2))]
    while any(each.finish_reason is None for each in made):
        scheduler.step()
    assert proposer.caught_up == [4, 20]


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a fast machine, too, a prompt takes many."""
    monkeypatch.setattr("warpsmith.engine.scheduler.LONGEST_PIECE", 512)


@pytest.mark.usefixtures("short_pieces")
def test_a_long_prompt_holds_up_neither_answers_nor_short_prompts() -> None:
    scheduler = Scheduler(backend_of("cpu"), 5000, parallel=3)
    first = generation(scheduler)
    scheduler.step()
    long = generation(scheduler, 4000, 1, max_tokens=2)
    scheduler.step()
    short = generation(scheduler, 5, 2, max_tokens=2)
    steps, seen = 0, [0, long.sequence.state.length]
    while not long.prefilled:
        before = first.stats.generated_tokens
        scheduler.step()
        steps += 1
        seen.append(long.sequence.state.length)
        assert first.stats.generated_tokens == before + 1 or first.finish_reason
        if steps == 2:
            assert short.prefilled, "prompts take turns"
    assert steps > 2
    assert all(b - a <= 512 + 512 // 2 for a, b in pairwise(seen)), "a piece, after another that was shorter than half"


@pytest.mark.usefixtures("short_pieces")
def test_leaving_during_the_prompt_frees_the_state_before_the_next_piece() -> None:
    scheduler = Scheduler(backend_of("cpu"), 5000)
    long = generation(scheduler, 4000, 1)
    waits = generation(scheduler, 20, 2, max_tokens=5)
    scheduler.step()
    scheduler.step()
    state = long.sequence.state
    assert 0 < state.length < 4000
    scheduler.cancel(long)
    scheduler.cancel(long)  # and once more, which does nothing
    assert scheduler._states == [state]
    scheduler.step()
    assert (waits.sequence.state, waits.prefilled, long.prefilled) == (state, True, False)
    while waits.finish_reason is None:
        scheduler.step()
    assert [token for tokens in waits.runs for token in tokens] == plain(prompt_of(20, 2), on="cpu", max_tokens=5)
    assert run(scheduler, prompt_of(4000, 1), max_tokens=2) == plain(
        prompt_of(4000, 1), on="cpu", context=5000, max_tokens=2
    )


# What fails


class Broken:
    """Forward passes and constraints that fail when they are told to."""

    fails = False

    def allow(self, logits: np.ndarray) -> np.ndarray:
        if self.fails:
            raise ZeroDivisionError
        return logits

    def took(self, token: int) -> None:
        return None


def test_a_defect_ends_one_request_and_no_other() -> None:
    scheduler, broken = Scheduler(backend_of("cpu"), 256, parallel=3), Broken()
    made = [
        generation(scheduler, seed=seed, max_tokens=9, constraint=broken if seed == 1 else None) for seed in range(3)
    ]
    for _ in range(5):
        scheduler.step()
    broken.fails = True
    while scheduler.running or scheduler.prefilling:
        scheduler.step()
    assert isinstance(made[1].error, ZeroDivisionError)
    for seed in (0, 2):
        text = [token for tokens in made[seed].runs for token in tokens]
        assert text == plain(prompt_of(10, seed), on="cpu", max_tokens=9)
    assert len(scheduler._states) == 3


class Failing(ReferenceBackend):
    """A device that fails once."""

    fails = False

    def forward(self, batch: Batch, want: Want = Want()) -> Output:  # noqa: B008
        if self.fails:
            self.fails = False
            raise MemoryError
        return super().forward(batch, want)


def test_a_pass_that_fails_ends_those_in_it_and_the_next_goes_on() -> None:
    backend = Failing(SMALL, BACKEND.tensors)
    scheduler = Scheduler(backend, 64, parallel=2)
    struck = [generation(scheduler, seed=seed, max_tokens=9) for seed in range(2)]
    waits = generation(scheduler, seed=2, max_tokens=4)
    for _ in range(2):
        scheduler.step()
    backend.fails = True
    while waits.finish_reason is None:
        scheduler.step()
    assert all(isinstance(each.error, MemoryError) for each in struck)
    assert [token for tokens in waits.runs for token in tokens] == plain(prompt_of(10, 2), max_tokens=4)


# Nodes and memory


class Counting(ReferenceBackend):
    """Keeps the sizes of the trees of every pass."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.passes: list[list[int]] = []

    def forward(self, batch: Batch, want: Want = Want()) -> Output:  # noqa: B008
        self.passes.append([len(tree) for _, tree in batch])
        return super().forward(batch, want)


def test_sequences_share_the_nodes_of_a_pass() -> None:
    for largest in (16, 64):
        backend = Counting(SMALL, BACKEND.tensors)
        backend.largest_tree = largest
        seen: list[Context] = []

        def rule(context: Context, seen: list[Context] = seen) -> Any:
            seen.append(context)
            return guessing([], 0.0, MAX_NODES)(context)

        scheduler = Scheduler(backend, 128, Scripted(rule), parallel=3)
        made = [generation(scheduler, seed=seed, max_tokens=60) for seed in range(3)]
        for _ in range(4):
            scheduler.step()
        assert all(each.prefilled for each in made)
        assert {tuple(sizes) for sizes in backend.passes if len(sizes) == 3} == {(largest // 3,) * 3}
        told = [dataclasses.astuple(context.others) for context in seen[-3:]]
        assert told == [(2, 2), (2, largest // 3 + 1), (2, 2 * (largest // 3))], "nodes taken, and a root for the rest"
        with pytest.raises(BadRequest, match="sequences"):
            Scheduler(backend, 16, parallel=largest + 1)


@contextmanager
def with_free(backend: Backend, nbytes: int | None) -> Iterator[Backend]:
    backend.free_memory = lambda: nbytes  # type: ignore[method-assign]
    try:
        yield backend
    finally:
        del backend.free_memory  # type: ignore[method-assign]


def test_sequences_and_snapshots_are_planned_from_the_memory_there_is() -> None:
    backend, context = backend_of("cpu"), 256
    one = sum(p.nbytes for p in backend.memory(context, 2)) - sum(p.nbytes for p in backend.memory(context, 1))
    for free, parallel in ((100 * one, 8), (8 * one, 4), (3 * one, 1), (one, 1)):
        with with_free(backend, free):
            assert plan(backend, context, None, None) == (parallel, (free - parallel * one) // 4)
            assert plan(backend, context, 1, 0) == (1, 0)
    with with_free(backend, 10 * one):
        assert plan(backend, context, 4, 6 * one) == (4, 6 * one)
        for parallel, cache in ((4, 6 * one + 1), (11, 0), (1, 10 * one)):
            with pytest.raises(DoesNotFit, match="sequences of 256 tokens"):
                plan(backend, context, parallel, cache)
    with with_free(backend, 1 << 50):
        assert plan(backend, context, None, None) == (8, CACHE_BYTES)
    with with_free(backend, None):
        assert plan(backend, context, None, None) == (8, CACHE_BYTES)
