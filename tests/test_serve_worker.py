"""The thread that runs the model: what it promises to those who wait for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import warpsmith
from warpsmith.backend.sampling import Sampling
from warpsmith.errors import ModelNotFound
from warpsmith.llm import LLM
from warpsmith.serve import service
from warpsmith.serve.constraints import Grammars, Thoughts
from warpsmith.serve.engine import Worker
from warpsmith.serve.job import Busy, Closing, End, Event, Job, Loading, Post, Request, Run

PROMPT = list(range(300, 340))


class Ended:
    """Keeps how requests ended."""

    def __init__(self) -> None:
        self.stats: list[Any] = []

    def finished(self, job: Job, stats: Any) -> None:
        self.stats.append(stats)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return warpsmith.load(context=4096)


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker(lambda: warpsmith.load(context=4096), queue=3, listener=Ended())
    worker.start()
    worker.loaded.result()
    yield worker
    worker.close()
    worker.abandon()
    assert worker.ended(60)


def request(prompt: list[int] = PROMPT, **options: Any) -> Request:
    return Request(prompt, options.pop("sampling", Sampling()), **({"max_tokens": 8} | options))


async def everything(job: Job) -> tuple[list[int], str, End]:
    tokens, text = [], ""
    while True:
        for event in await job.take():
            if isinstance(event, Run):
                tokens += event.tokens
                text += event.text
            if isinstance(event, End):
                return tokens, text + event.text, event


def test_answers_are_those_of_the_engine(worker: Worker, llm: LLM) -> None:
    async def ask() -> list[tuple[list[int], str, End]]:
        sampled = Sampling(temperature=1.0, seed=4)
        jobs = worker.submit([request(), request(sampling=sampled, max_tokens=30), request(stop=("e",), max_tokens=60)])
        return [await everything(job) for job in jobs]

    greedy, sampled, stopped = asyncio.run(ask())
    for (tokens, text, end), options in (
        (greedy, {"max_tokens": 8, "temperature": 0}),
        (sampled, {"max_tokens": 30, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 4}),
        (stopped, {"max_tokens": 60, "temperature": 0, "stop": "e"}),
    ):
        alone = llm.generate(PROMPT, **options)  # type: ignore[arg-type]
        assert (tokens, text, end.reason) == (alone.token_ids, alone.text, alone.finish_reason)
    assert stopped[2].stop == "e"


async def reads(worker: Worker) -> None:
    """Wait until the model is at work on a long prompt."""
    while not any(len(each.prompt) > 2000 for each in list(worker.llm.scheduler.prefilling)):
        await asyncio.sleep(0)


@pytest.mark.parametrize("during", ["prompt", "answer"])
def test_cancelling_takes_effect_before_the_next_step(worker: Worker, during: str) -> None:
    async def ask() -> tuple[list[int], str, End]:
        long = request(list(range(300, 2900)), max_tokens=None, ignore_eos=True)
        running, waiting, other = worker.submit([long, request(), request()])
        waiting.cancel()
        if during == "prompt":
            await reads(worker)
        else:
            await running.take()
        running.cancel()
        return await everything(other)

    assert asyncio.run(ask())[2].stats.generated_tokens == 8
    assert [stats is None for stats in worker.listener.stats] == [True, True, False]  # type: ignore[union-attr]


def test_what_was_submitted_before_the_end_is_served(worker: Worker) -> None:
    """Also where the loop has had no time to hand it over."""

    async def ask() -> tuple[list[int], str, End]:
        (job,) = worker.submit([request()])
        worker.close()
        return await everything(job)

    assert len(asyncio.run(ask())[0]) == 8


def test_too_many_are_refused_together(worker: Worker) -> None:
    async def ask() -> None:
        endless = request(max_tokens=None, ignore_eos=True)
        (running,) = worker.submit([endless])
        await running.take()
        with pytest.raises(Busy):
            worker.submit([request()] * 4)
        assert worker.waiting == 0
        jobs = worker.submit([request()] * 3)
        with pytest.raises(Busy):
            worker.submit([request()])
        running.cancel()
        assert [len((await everything(job))[0]) for job in jobs] == [8] * 3
        worker.close()
        with pytest.raises(Closing):
            worker.submit([request()])

    asyncio.run(ask())


@pytest.fixture
def crowd() -> Iterator[Worker]:
    worker = Worker(lambda: warpsmith.load(context=4096, draft="auto", parallel=3), queue=3, listener=Ended())
    worker.start()
    worker.loaded.result()
    yield worker
    worker.close()
    worker.abandon()
    assert worker.ended(60)


def test_several_at_a_time_get_what_they_get_alone(crowd: Worker, llm: LLM) -> None:
    """Also while others come and go: one leaves during its prompt, one during its answer."""

    async def ask() -> list[list[int]]:
        sampled = request(sampling=Sampling(temperature=1.0, seed=4), max_tokens=30, top_logprobs=2)
        long, endless = request(list(range(300, 2900))), request(max_tokens=None, ignore_eos=True)
        leaving, staying, last, first = crowd.submit([long, endless, sampled, request(max_tokens=40)])
        await reads(crowd)
        leaving.cancel()
        await staying.take()
        found = [(await everything(job))[0] for job in (first, last)]
        staying.cancel()
        return found

    greedy, sampled = asyncio.run(ask())
    assert greedy == llm.generate(PROMPT, max_tokens=40, temperature=0).token_ids
    assert sampled == llm.generate(PROMPT, max_tokens=30, temperature=1.0, top_k=0, top_p=1.0, seed=4).token_ids


def test_as_many_as_run_and_as_may_wait_are_taken(crowd: Worker) -> None:
    async def ask() -> None:
        endless = request(max_tokens=None, ignore_eos=True)
        with pytest.raises(Busy):
            crowd.submit([endless] * 7)
        jobs = crowd.submit([endless] * 6)
        assert (crowd.processing, crowd.waiting) == (3, 3)
        for job in jobs[:3]:
            await job.take()  # they run side by side: none has ended
        with pytest.raises(Busy):
            crowd.submit([request()])
        jobs[1].cancel()
        await jobs[3].take()
        for job in jobs:
            job.cancel()

    asyncio.run(ask())


class Broken:
    def allow(self, logits: np.ndarray) -> np.ndarray:
        raise ZeroDivisionError("a defect")

    def took(self, token: int) -> None: ...


def test_a_defect_ends_one_request_only(worker: Worker, llm: LLM) -> None:
    async def ask() -> list[int]:
        broken, fine = worker.submit([request(constraint=Broken), request()])
        with pytest.raises(ZeroDivisionError):
            await everything(broken)
        return (await everything(fine))[0]

    assert asyncio.run(ask()) == llm.generate(PROMPT, max_tokens=8, temperature=0).token_ids


def test_a_model_that_cannot_be_loaded_says_why() -> None:
    def load() -> LLM:
        raise ModelNotFound("There is none.")

    worker = Worker(load)
    with pytest.raises(Loading):
        worker.llm  # noqa: B018
    worker.start()
    with pytest.raises(ModelNotFound):
        worker.loaded.result(60)
    assert worker.ended(60)


def test_events_that_nobody_took_are_joined(worker: Worker, llm: LLM) -> None:
    async def ask() -> list[Event]:
        (job,) = worker.submit([request(max_tokens=30, top_logprobs=1)])
        while worker.open:
            await asyncio.sleep(0)
        events = []
        while not events or not isinstance(events[-1], End):
            events += job.taken()
        return events

    run, end = asyncio.run(ask())
    assert isinstance(run, Run)
    assert isinstance(end, End)
    alone = llm.generate(PROMPT, max_tokens=30, temperature=0)
    assert (run.tokens, run.text + end.text) == (alone.token_ids, alone.text)
    assert [logprob.token for logprob in run.logprobs] == run.tokens
    assert run.steps == [(0, 1)] * len(run.tokens)
    assert len(run.tokens) > 1


def test_readers_are_woken_at_a_pace_and_at_once_if_it_is_urgent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpsmith.serve.job.PACE", 1e6)

    async def woken(job: Job) -> bool:
        for _ in range(3):  # rounds of the loop
            await asyncio.sleep(0)
        found = job.news.is_set()
        job.news.clear()
        return found

    async def tell() -> list[list[bool]]:
        post = Post(asyncio.get_running_loop())
        found: list[list[bool]] = []
        jobs = [Job(request(), post, asyncio.Event()) for _ in range(2)]
        for job, urgent in ((jobs[0], False), (jobs[0], False), (jobs[1], True)):
            job.put(Run("", [], [], []), urgent=urgent)
            found += [[await woken(each) for each in jobs]]
        return found

    assert asyncio.run(tell()) == [[True, False], [False, False], [True, True]]


def test_silence_is_broken_while_a_long_prompt_is_read(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "KEEP_ALIVE", 0.001)
    monkeypatch.setattr("warpsmith.engine.scheduler.LONGEST_PIECE", 64)

    async def ask() -> list[bool]:
        jobs = worker.submit([request(list(range(300, 2900)))])
        return [news is None async for news in service.events(jobs)]

    silences = asyncio.run(ask())
    assert silences[0], "however many pieces the prompt is cut into"
    assert not silences[-1]


def test_silence_is_broken(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "KEEP_ALIVE", 0.001)

    async def ask() -> Any:
        running, waiting = worker.submit([request(max_tokens=None, ignore_eos=True), request()])
        async for news in service.events([waiting]):
            running.cancel()
            if news is None:
                return news

    assert asyncio.run(ask()) is None


# Constraints, with a draft and without


def texts(llm: LLM, constraint: Callable[[], Any], prompt: str, **options: Any) -> tuple[str, int]:
    worker = Worker(lambda: llm)

    async def ask() -> tuple[str, int]:
        worker.loaded.result()
        (job,) = worker.submit([request(llm.tokenizer.encode(prompt), constraint=constraint, **options)])
        _, text, end = await everything(job)
        return text, end.stats.accepted_tokens

    worker.start()
    try:
        return asyncio.run(ask())
    finally:
        worker.close()
        assert worker.ended(60)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=3)])
def test_a_grammar_holds_under_speculation_and_the_text_is_the_same(sampling: Sampling) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "parts": {"type": "array", "maxItems": 3}},
        "required": ["name", "parts"],
        "additionalProperties": False,
    }
    found = set()
    for draft in (None, "ngram"):
        llm = warpsmith.load(context=1024, draft=draft, spec_budget=8)
        grammar = Grammars(llm.tokenizer, llm.config.vocab).json_schema(schema, "schema")
        prompt = '{"name": "a", "parts": []}\n' * 12
        text, accepted = texts(llm, grammar, prompt, sampling=sampling, max_tokens=200)
        found.add(text)
        assert (accepted > 0) == (draft is not None)
    (text,) = found
    assert set(json.loads(text)) == {"name", "parts"}


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_thoughts_end_with_their_budget(budget: int) -> None:
    llm = warpsmith.load(context=512)
    tokenizer = llm.tokenizer
    mark = tokenizer.token_id("</think>")
    assert mark is not None
    sampling = Sampling(logit_bias={mark: -100.0, **dict.fromkeys(tokenizer.eos_ids, -100.0)})
    then = Grammars(tokenizer, llm.config.vocab).regex("yes|no", "regex")
    for after in (None, then):
        llm = warpsmith.load(context=512)
        thoughts = Thoughts.of(tokenizer, budget, after)
        text, _ = texts(llm, thoughts, "<|im_start|>assistant\n<think>\n", sampling=sampling, max_tokens=budget + 12)
        thought, closed, answer = text.partition("\n</think>\n\n")
        assert closed
        assert len(tokenizer.encode(thought)) <= budget + 1
        assert answer.startswith(("yes", "no")) if after else answer
