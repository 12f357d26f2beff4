"""What a request is, what its reader hears of it, and how that comes from the thread that runs the model."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import Protocol

from warpsmith.backend.sampling import Sampling
from warpsmith.engine.choice import Constraint
from warpsmith.engine.loop import FinishReason
from warpsmith.engine.stats import Stats
from warpsmith.errors import WarpsmithError

PACE = 0.02  # seconds at least from one time that readers are woken to the next: faster than a screen shows it
EACH = 0.0075  # seconds at least for each of them: what more events cost, the model would not have


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
    answer_kept: bool = False  # the next turn's prompt may go on from the answer, whatever `kept` says


@dataclass(frozen=True)
class Logprob:
    """A token, the logarithm of its probability before any sampling setting, and its rivals, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Run:
    """The tokens of one step, or of several that were taken together. `text` may lag behind them."""

    text: str
    tokens: list[int]
    logprobs: list[Logprob]
    steps: list[tuple[int, int]]  # tokens that were guessed for each, and tokens that it decided

    @classmethod
    def joined(cls, runs: Sequence[Run]) -> list[Run]:
        """All of them as one, if there are any."""
        if len(runs) < 2:
            return list(runs)
        return [
            cls(
                "".join(run.text for run in runs),
                [token for run in runs for token in run.tokens],
                [logprob for run in runs for logprob in run.logprobs],
                [step for run in runs for step in run.steps],
            )
        ]


@dataclass(frozen=True)
class End:
    text: str  # what was held back
    reason: FinishReason
    stop: str | None  # the stop string that ended the text
    stats: Stats


Event = Run | End


class Busy(WarpsmithError):
    """The queue is full. `retry_after` is in seconds."""

    retry_after = 1


class Closing(WarpsmithError):
    """The server is going down."""


class Loading(WarpsmithError):
    """The model is not there yet."""


class Listener(Protocol):
    """Hears of every request that ends, from the worker's thread."""

    def finished(self, job: Job, stats: Stats | None) -> None: ...


class Post:
    """From the worker's thread to the event loop: what all jobs are told, together.

    Between two rounds lie `PACE` and `EACH` for every reader of the first at least, unless something is urgent: at a
    thousand tokens a second a reader who was woken for each of them would take the model's processors away.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._told: deque[Job] = deque()  # whose readers do not know yet
        self._due = self._hurry = False  # a round is to come; at once
        self._next: asyncio.TimerHandle | None = None

    def tell(self, job: Job, urgent: bool) -> None:
        """Wake the job's reader soon. From any thread."""
        if not job.told:
            job.told = True
            self._told.append(job)
        if self._hurry or (self._due and not urgent):
            return
        self._due = self._hurry = True
        try:
            self.loop.call_soon_threadsafe(self._round)
        except RuntimeError:  # the loop is closed
            job.cancelled, self._due, self._hurry = True, False, False

    def _round(self) -> None:
        self._hurry = False  # first: what is told from here on may need another round
        readers = 0
        while self._told:
            job, readers = self._told.popleft(), readers + 1
            job.told = False  # first, likewise
            job.news.set()
        if self._next is not None:
            self._next.cancel()
        self._next = self.loop.call_later(max(PACE, EACH * readers), self._rest)

    def _rest(self) -> None:
        self._due = False  # first, likewise
        if self._told:
            self._due = True
            self._round()


class Job:
    """A request in the queue or at work. Made by `Worker.submit`."""

    _numbers = count(1)

    def __init__(self, request: Request, post: Post, news: asyncio.Event) -> None:
        """`news` is set when there are events, here or for another of those submitted together."""
        self.request, self.number = request, next(self._numbers)
        self.submitted = perf_counter()
        self.first_token: float | None = None
        self.news, self._post = news, post
        self._events: deque[Event | BaseException] = deque()
        self.cancelled = False  # nobody waits for it any more
        self.told = False  # its reader is about to be woken

    def cancel(self) -> None:
        self.cancelled = True

    async def take(self) -> list[Event]:
        """The events since the last call, at least one; the last of all is `End`. May be given up and called again."""
        while not (events := self.taken()):
            self.news.clear()
            await self.news.wait()
        return events

    def taken(self) -> list[Event]:
        """The same without waiting: there may be none."""
        events: list[Event] = []
        runs: list[Run] = []
        while self._events and not isinstance(event := self._events[0], BaseException):
            self._events.popleft()
            if isinstance(event, Run):
                runs.append(event)
            else:
                events += [*Run.joined(runs), event]
                runs = []
        events += Run.joined(runs)
        if not events and self._events and isinstance(failure := self._events[0], BaseException):
            raise failure  # after what came before it
        return events

    # The worker's side

    def put(self, event: Event | BaseException, urgent: bool = True) -> None:
        self._events.append(event)
        self._post.tell(self, urgent)
