"""The one thread that runs the model, and the narrow door to it.

Everything else in `serve/` is asyncio and never touches the backend: it hands in a `Request` and reads events until
`End`. What the door promises, whoever stands behind it:

- `Worker.submit` takes some requests together or refuses them together: `Busy` when too many wait, `Closing` when the
  server is on its way down, `Loading` before the model is there.
- `Job.take` gives the events there are, `Run` and finally `End`; a failure is raised from it. Events that nobody has
  taken yet are kept and joined, so a slow reader never holds up the model, nor a fast model its reader.
- `Job.cancel` takes effect before the next step of decoding or the next piece of a prefill, from any thread.
- The text of a request is a function of the request alone, whatever runs beside it (`engine/scheduler.py`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from time import perf_counter

import numpy as np

from warpsmith.engine.loop import Generation
from warpsmith.engine.text import Text
from warpsmith.llm import LLM
from warpsmith.serve.job import Busy, Closing, End, Job, Listener, Loading, Logprob, Post, Request, Run

GATHER = 4  # rounds of the event loop from a request to its beginning


@dataclass
class Worker:
    """Owns the model. `start`, then `submit`; `close` lets what has begun end first, for a while."""

    load: Callable[[], LLM]
    queue: int = 64  # requests that may wait
    listener: Listener | None = None
    loaded: Future[LLM] = field(default_factory=Future)  # the model, or why there is none

    def __post_init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._open: dict[int, Job] = {}  # submitted and not ended
        self._lock = threading.Lock()
        self._closing = False
        self._post: Post | None = None
        self._thread = threading.Thread(target=self._main, name="warpsmith-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def llm(self) -> LLM:
        """The model; its tokenizer and facts may be used from any thread."""
        if not self.loaded.done():
            raise Loading("Loading model", "Try again in a while.")
        return self.loaded.result()

    @property
    def processing(self) -> int:
        return min(self.open, self.parallel) if self.open else 0  # none are open while it loads

    @property
    def open(self) -> int:
        return len(self._open)

    @property
    def parallel(self) -> int:
        """How many run at a time."""
        return self.llm.scheduler.parallel

    @property
    def waiting(self) -> int:
        return self.open - self.processing

    def submit(self, requests: Sequence[Request]) -> list[Job]:
        """Queue all of them, or none. Call it where the event loop runs."""
        self.llm  # noqa: B018  refuses while loading
        with self._lock:
            if self._closing:
                raise Closing("The server is shutting down.", "Start it again, or ask another.")
            if self.open + len(requests) > self.queue + self.parallel:
                raise Busy(f"{self.waiting} requests are waiting already, as many as may.", "Try again in a moment.")
            news = asyncio.Event()
            jobs = [Job(request, self._post_here(), news) for request in requests]
            self._open.update((job.number, job) for job in jobs)
        self._hand_over(jobs, self._post_here().loop)
        return jobs

    def _hand_over(self, jobs: Sequence[Job | None], loop: asyncio.AbstractEventLoop, rounds: int = GATHER) -> None:
        """Give them to the model once the loop has gone round so often: requests that come together begin together, and
        while the model works, little else asks for its processors. A loop that has nothing else to do is soon round."""
        if rounds:
            loop.call_soon(self._hand_over, jobs, loop, rounds - 1)
        else:
            for job in jobs:
                self._jobs.put(job)

    def _post_here(self) -> Post:
        loop = asyncio.get_running_loop()
        if self._post is None or self._post.loop is not loop:
            self._post = Post(loop)
        return self._post

    def close(self) -> None:
        """Take no more requests; the thread ends when those it has are done. Returns at once."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        post = self._post
        if post is None or post.loop.is_closed():
            self._jobs.put(None)
        else:
            post.loop.call_soon_threadsafe(self._hand_over, [None], post.loop)  # after those that were submitted

    def abandon(self) -> list[Job]:
        """Cancel what is still open after `close`, and tell whoever waits for it. Returns those requests."""
        with self._lock:
            jobs = list(self._open.values())
        for job in jobs:
            job.cancel()
            job.put(Closing("The server is shutting down.", "Ask again when it is back."))
        return jobs

    def ended(self, seconds: float) -> bool:
        """Wait for the thread to end, for so long at most."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    # The worker's thread

    def _main(self) -> None:
        try:
            llm = self.load()
            llm.tokenizer  # noqa: B018  read here, once
        except BaseException as error:
            self.loaded.set_exception(error)
            return
        with llm:
            self.loaded.set_result(llm)
            self._run(llm)

    def _run(self, llm: LLM) -> None:
        """Begin what is new, break off what nobody waits for, and step, until there will be nothing more."""
        answers: list[_Answer] = []
        taking = True
        while taking or answers:
            for job in self._new_jobs(wait=taking and not answers):
                if job is None:
                    taking = False
                else:
                    self._begin(llm, job, answers)
            for answer in [answer for answer in answers if answer.job.cancelled]:
                llm.scheduler.cancel(answer.generation)
                answers.remove(answer)
                self._end(answer.job, None)
            if answers:
                llm.scheduler.step()
            for answer in answers.copy():
                if (ending := answer.advance()) is not None:
                    answers.remove(answer)
                    self._end(answer.job, ending)

    def _new_jobs(self, wait: bool) -> Iterator[Job | None]:
        """Those that were submitted; None is the last. `wait` for one if there is none."""
        try:
            while True:
                yield self._jobs.get(block=wait)
                wait = False
        except Empty:
            return

    def _begin(self, llm: LLM, job: Job, answers: list[_Answer]) -> None:
        try:
            answers.append(_Answer(llm, job))
        except Exception as error:
            self._end(job, error)

    def _end(self, job: Job, ending: End | BaseException | None) -> None:
        with self._lock:
            del self._open[job.number]
        if self.listener is not None:
            self.listener.finished(job, ending.stats if isinstance(ending, End) else None)
        if ending is not None:  # last: whoever hears of the end finds it counted and its place free
            job.put(ending)


class _Answer:
    """A request at work, and its text."""

    def __init__(self, llm: LLM, job: Job) -> None:
        request, tokenizer = job.request, llm.tokenizer
        self.job, self._text = job, Text(tokenizer, request.stop)
        self._logprobs = _Logprobs(request.top_logprobs)
        self.generation = Generation(
            llm.scheduler,
            request.prompt,
            request.sampling,
            max_tokens=request.max_tokens,
            stop_ids=frozenset() if request.ignore_eos else tokenizer.eos_ids,
            until=self._text.push if request.stop else None,
            kept=request.kept,
            answer_kept=request.answer_kept,
            constraint=request.constraint() if request.constraint else None,
            on_logits=None if request.top_logprobs is None else self._logprobs.see,
        )
        llm.scheduler.add(self.generation)

    def advance(self) -> End | BaseException | None:
        """Tell of what the last step decided; returns how the answer ended, if it did."""
        generation, job = self.generation, self.job
        while generation.runs:
            tokens, first = generation.runs.popleft(), job.first_token is None
            if first:
                job.first_token = perf_counter()
            if not job.request.stop:
                for token in tokens:
                    if token not in generation.stop_ids:
                        self._text.push(token)
            drafted = generation.drafted
            steps = [(drafted, len(tokens))] if drafted else [(0, 1)] * len(tokens)
            job.put(Run(self._text.take(), tokens, self._logprobs.take(), steps), urgent=first)
        if generation.error is not None:
            return generation.error
        if generation.finish_reason is None:
            return None
        return End(self._text.finish(), generation.finish_reason, self._text.hit, generation.stats)


class _Logprobs:
    """The probabilities of each token of a step."""

    def __init__(self, top: int | None) -> None:
        self._top, self._seen = top or 0, list[Logprob]()

    def see(self, logits: np.ndarray, token: int) -> None:
        row = logits.astype(np.float64)
        row -= row.max()
        row -= np.log(np.exp(row).sum())
        best = np.argpartition(-row, self._top)[: self._top] if self._top else np.empty(0, dtype=int)
        order = best[np.lexsort((best, -row[best]))]
        self._seen.append(Logprob(token, float(row[token]), [(int(id), float(row[id])) for id in order]))

    def take(self) -> list[Logprob]:
        seen, self._seen = self._seen, []
        return seen
