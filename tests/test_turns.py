"""Requests from several threads on one model: they queue, none is hurt, and closing ends them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from warpsmith.backend.devices import backend_for
from warpsmith.engine.turns import Turns
from warpsmith.errors import BadRequest
from warpsmith.llm import LLM
from warpsmith.model.synthetic import tiny_model
from warpsmith.model.weights import read_config

TINY = tiny_model()
PROMPTS = ("one", "two and a half", "three threads", "four")


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(backend_for("cpu", TINY, read_config(TINY), threads=1), TINY, 256) as llm:
        yield llm


def answer(llm: LLM, prompt: str) -> list[int]:
    return llm.generate(prompt, max_tokens=12, stop_ids=[], temperature=0).token_ids


def in_the_background(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def until(condition: Callable[[], bool]) -> None:
    """What another thread is about to do."""
    while not condition():
        pass


def test_many_threads_get_their_own_answers(llm: LLM) -> None:
    expected = {prompt: answer(llm, prompt) for prompt in PROMPTS}
    rows = llm.score([1, 2, 3])
    with ThreadPoolExecutor(6) as pool:
        answers = [(prompt, pool.submit(answer, llm, prompt)) for prompt in PROMPTS * 6]
        scores = [pool.submit(llm.score, [1, 2, 3]) for _ in range(4)]
        for prompt, found in answers:
            assert found.result() == expected[prompt]
        for score in scores:
            assert (score.result() == rows).all()


def test_a_request_waits_until_the_one_before_it_is_done(llm: LLM) -> None:
    first, second = (answer(llm, prompt) for prompt in PROMPTS[:2])
    stream = llm.stream(PROMPTS[0], max_tokens=12, stop_ids=[], temperature=0)
    taken = list(next(stream).token_ids)
    found: list[list[int]] = []
    other = in_the_background(lambda: found.append(answer(llm, PROMPTS[1])))
    until(lambda: llm._turns.waiting == 1)
    for chunk in stream:
        assert not found, "it is not its turn"
        taken += chunk.token_ids
        if chunk.finish_reason is not None:
            break  # the last chunk gives the turn away, whether or not anybody asks for more
    other.join()
    assert (taken, found) == (first, [second])


def test_a_stream_that_is_dropped_gives_its_turn_away(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], max_tokens=12, stop_ids=[])
    next(stream)
    found: list[list[int]] = []
    other = in_the_background(lambda: found.append(answer(llm, PROMPTS[1])))
    until(lambda: llm._turns.waiting == 1)
    del stream
    other.join()
    assert found == [answer(llm, PROMPTS[1])]


def test_who_has_left_a_stream_unfinished_is_told_and_it_is_not_hurt(llm: LLM) -> None:
    expected = answer(llm, PROMPTS[0])
    stream = llm.stream(PROMPTS[0], max_tokens=12, stop_ids=[], temperature=0)
    taken = list(next(stream).token_ids)
    for request in (lambda: answer(llm, PROMPTS[1]), lambda: llm.score([1])):
        with pytest.raises(BadRequest, match="last stream is not finished") as caught:
            request()
        assert "close" in caught.value.fix
    assert taken + [token for chunk in stream for token in chunk.token_ids] == expected
    stream = llm.stream(PROMPTS[0], max_tokens=12, stop_ids=[])
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert answer(llm, PROMPTS[0]) == expected


def test_a_stream_that_threads_hand_on_is_nobody_s_in_particular(llm: LLM) -> None:
    """As servers do that run each step on any thread of a pool: who began it may begin another, which waits."""
    first, second = (answer(llm, prompt) for prompt in PROMPTS[:2])
    stream = llm.stream(PROMPTS[0], max_tokens=12, stop_ids=[], temperature=0)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        taken = list(one.submit(next, stream).result().token_ids)
        taken += other.submit(next, stream).result().token_ids
        waits = one.submit(answer, llm, PROMPTS[1])
        until(lambda: llm._turns.waiting == 1)
        taken += [token for chunk in stream for token in chunk.token_ids]
        assert (taken, waits.result()) == (first, second)


def test_closing_ends_the_request_that_runs_and_those_that_wait(llm: LLM) -> None:
    running, problems = threading.Event(), []

    def stream() -> None:
        try:
            for _ in llm.stream(PROMPTS[0], stop_ids=[]):
                running.set()
                until(lambda: llm._turns.waiting == 1 or llm._turns.closed)
        except BadRequest as error:
            problems.append(error.problem)

    def wait() -> None:
        try:
            answer(llm, PROMPTS[1])
        except BadRequest as error:
            problems.append(error.problem)

    threads = [in_the_background(stream)]
    running.wait()
    threads.append(in_the_background(wait))
    until(lambda: llm._turns.waiting == 1)
    llm.close()
    for thread in threads:
        thread.join()
    assert problems == ["This model is closed."] * 2
    with pytest.raises(BadRequest, match="closed"):
        llm.generate("x")


def test_closing_from_inside_a_request(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], stop_ids=[])
    next(stream)
    llm.close()
    with pytest.raises(BadRequest, match="closed"):
        next(stream)


def test_turns_come_in_order() -> None:
    turns, order = Turns(), []
    first = turns.take()

    def queue(number: int) -> None:
        turn = turns.take()
        order.append(number)
        turns.give(turn)

    threads = []
    for number in range(5):
        threads.append(in_the_background(lambda number=number: queue(number)))  # type: ignore[misc]
        until(lambda number=number: turns.waiting == number + 1)  # type: ignore[misc]
    turns.give(first)
    for thread in threads:
        thread.join()
    assert order == list(range(5))
