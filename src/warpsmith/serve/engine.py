"""The one thread that runs the model, and the narrow door to it.

Everything else in `serve/` is asyncio and never touches the backend: it hands in a `Request` and reads events until
`End`. What the door promises, whoever stands behind it:

- `Worker.submit` takes some requests together or refuses them together: `Busy` when too many wait, `Closing` when the
  server is on its way down, `Loading` before the model is there.
- `Job.take` gives the events there are, `Prefilled` and `Run` and finally `End`; a failure is raised from it. Events
  that nobody has taken yet are kept, so a slow reader never holds up the model.
- `Job.cancel` takes effect before the next step of decoding or the next piece of a prefill, from any thread.
- The text of a request is a function of the request alone.

Today requests run one after another on the one conversation that an `LLM` has. A scheduler that runs many at a time
replaces `_serve`, and nothing else here.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from queue import SimpleQueue
from time import perf_counter
from typing import Protocol

import numpy as np

from warpsmith.backend.sampling import Sampling
from warpsmith.engine.loop import Constraint, FinishReason, Generation, Step
from warpsmith.engine.stats import Stats
from warpsmith.engine.text import Text
from warpsmith.errors import WarpsmithError
from warpsmith.llm import LLM


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    sampling: Sampling
    kept: int | None = None  # of the prompt: tokens that the next turn's begins with; None: nobody knows
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None  # alternatives to show beside each token; None: no probabilities at all
    constraint: Callable[[], Constraint] | None = None


@dataclass(frozen=True)
class Logprob:
    """A token, the logarithm of its probability before any sampling setting, and its rivals, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Prefilled:
    """So many tokens of the prompt are done; a sign of life."""

    tokens: int


@dataclass(frozen=True)
class Run:
    """The tokens of one step. `text` may lag behind them."""

    text: str
    tokens: list[int]
    logprobs: list[Logprob]
    drafted: int  # tokens that were guessed for this step


@dataclass(frozen=True)
class End:
    text: str  # what was held back
    reason: FinishReason
    stop: str | None  # the stop string that ended the text
    stats: Stats


Event = Prefilled | Run | End


class Busy(WarpsmithError):
    """The queue is full. `retry_after` is in seconds."""

    retry_after = 1


class Closing(WarpsmithError):
    """The server is going down."""


class Loading(WarpsmithError):
    """The model is not there yet."""


class _Cancelled(Exception):
    """Nobody waits for this request any more."""


class Listener(Protocol):
    """Hears of every request that ends, from the worker's thread."""

    def finished(self, job: Job, stats: Stats | None) -> None: ...


class Job:
    """A request in the queue or at work. Made by `Worker.submit`."""

    _numbers = count(1)

    def __init__(self, request: Request) -> None:
        self.request, self.number = request, next(self._numbers)
        self.submitted = perf_counter()
        self.first_token: float | None = None
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._events: deque[Event | BaseException] = deque()
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    async def take(self) -> list[Event]:
        """The events since the last call, at least one; the last of all is `End`. May be given up and called again."""
        while not self._events:
            self._news.clear()
            await self._news.wait()
        events: list[Event] = []
        while self._events:
            event = self._events[0]
            if isinstance(event, BaseException):
                if events:  # first what came before it
                    break
                raise event
            events.append(self._events.popleft())  # type: ignore[arg-type]
        return events

    # The worker's side

    def check(self, done: int = 0) -> None:
        """Break off if nobody waits any more; else tell how much of the prompt is done."""
        if self._cancelled:
            raise _Cancelled
        if done:
            self.put(Prefilled(done))

    def put(self, event: Event | BaseException) -> None:
        self._events.append(event)
        if not self._news.is_set():
            try:
                self._loop.call_soon_threadsafe(self._news.set)
            except RuntimeError:  # the loop is closed
                self._cancelled = True


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
        self._running: Job | None = None
        self._closing = False
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
        return int(self._running is not None)

    @property
    def open(self) -> int:
        return len(self._open)

    @property
    def waiting(self) -> int:
        return max(0, self.open - self.processing)

    def submit(self, requests: Sequence[Request]) -> list[Job]:
        """Queue all of them, or none. Call it where the event loop runs."""
        self.llm  # noqa: B018  refuses while loading
        with self._lock:
            if self._closing:
                raise Closing("The server is shutting down.", "Start it again, or ask another.")
            if self.waiting + len(requests) > self.queue + (self._running is None):
                raise Busy(f"{self.waiting} requests are waiting already, as many as may.", "Try again in a moment.")
            jobs = [Job(request) for request in requests]
            self._open.update((job.number, job) for job in jobs)
        for job in jobs:
            self._jobs.put(job)
        return jobs

    def close(self) -> None:
        """Take no more requests; the thread ends when those it has are done. Returns at once."""
        with self._lock:
            if not self._closing:
                self._closing = True
                self._jobs.put(None)

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
            while (job := self._jobs.get()) is not None:
                with self._lock:
                    self._running = job
                ending: End | Exception | None = None
                try:
                    ending = _serve(llm, job)
                except _Cancelled:
                    pass
                except Exception as error:
                    ending = error
                with self._lock:
                    self._running = None
                    del self._open[job.number]
                if self.listener is not None:
                    self.listener.finished(job, ending.stats if isinstance(ending, End) else None)
                if ending is not None:  # last: whoever hears of the end finds it counted and its place free
                    job.put(ending)


def _serve(llm: LLM, job: Job) -> End:
    """Run one request from its prompt to its end."""
    job.check()
    request, tokenizer = job.request, llm.tokenizer
    text, logprobs, drafted = Text(tokenizer, request.stop), _Logprobs(request.top_logprobs), [0]

    def count_drafted(step: Step) -> None:
        drafted[0] = len(step.tree) - 1

    generation = Generation(
        llm.conversation,
        request.prompt,
        request.sampling,
        max_tokens=request.max_tokens,
        stop_ids=frozenset() if request.ignore_eos else tokenizer.eos_ids,
        until=text.push,
        on_step=count_drafted,
        kept=request.kept,
        constraint=request.constraint() if request.constraint else None,
        on_logits=None if request.top_logprobs is None else logprobs.see,
        on_prefill=job.check,
    )
    runs = iter(generation)
    try:
        for tokens in runs:
            job.first_token = job.first_token or perf_counter()
            job.put(Run(text.take(), tokens, logprobs.take(), drafted[0]))
            drafted[0] = 0
            if generation.finish_reason is None:
                job.check()
    finally:
        runs.close()
    assert generation.finish_reason is not None
    return End(text.finish(), generation.finish_reason, text.hit, generation.stats)


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
