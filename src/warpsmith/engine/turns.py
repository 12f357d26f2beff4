"""Requests from many threads on one conversation: they queue, and the one whose turn it is is never hurt."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from warpsmith.errors import BadRequest


@dataclass(eq=False)
class Turn:
    """A request's place in the queue."""

    thread: int = field(default_factory=threading.get_ident)  # that began it
    moved: bool = False  # others have gone on with it since


_begun: ContextVar[Turn | None] = ContextVar("warpsmith_turn", default=None)  # the last one that was begun here


class Turns:
    """One request at a time, in the order in which they came. Who begins another request while its own last one is
    unfinished would wait for ever, and is refused."""

    def __init__(self) -> None:
        self.closed = False
        self._current: Turn | None = None
        self._waiting: deque[Turn] = deque()
        self._changed = threading.Condition()
        self._computing = threading.RLock()

    def take(self) -> Turn:
        """Wait for a turn; `give` it back whatever happens."""
        turn = Turn()
        with self._changed:
            before = self._current
            if before is not None and before is _begun.get() and not before.moved:
                raise BadRequest("The last stream is not finished.", "Finish or close it before the next request.")
            self._waiting.append(turn)
            try:
                self._changed.wait_for(lambda: self.closed or self._is_next(turn))
                self.check()
                self._current = turn
                _begun.set(turn)
                return turn
            finally:  # also when the wait is interrupted
                self._waiting.remove(turn)
                self._changed.notify_all()

    def give(self, turn: Turn) -> None:
        with self._changed:
            if self._current is turn:
                self._current = None
                self._changed.notify_all()

    @contextmanager
    def computing(self, turn: Turn) -> Iterator[None]:
        """Around everything that uses the model, so that it is not taken away meanwhile."""
        turn.moved = turn.moved or turn.thread != threading.get_ident()
        with self._computing:
            self.check()
            yield

    def close(self) -> None:
        """Whoever waits is told at once, whoever computes when the step is done; returns when nobody does any more."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        with self._computing:
            pass

    def check(self) -> None:
        if self.closed:
            raise BadRequest("This model is closed.", "Load it again.")

    @property
    def waiting(self) -> int:
        """How many requests wait for their turn."""
        return len(self._waiting)

    def _is_next(self, turn: Turn) -> bool:
        return self._current is None and self._waiting[0] is turn
