"""One sequence and its past: the committed state, the ids it holds, and snapshots to come back to.

A recurrent state cannot be cut short, so a prompt that only begins like the last one needs a snapshot from where the
two still agreed. Snapshots of a prompt are taken where splitting a prefill changes no bit (`Backend.prefill_multiple`):
a prompt computed from scratch and the same prompt continued from such a snapshot give the same numbers. A prompt that
continues the text just generated goes on from the live state, or from the snapshot that was taken when that was left.
That is as exact as generating on, but generated tokens need not be bit-equal to prefilled ones, so from there on
numbers may differ in the last bits from a new conversation's.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from warpsmith.backend.base import Backend, Output, Snapshot, Want, check_tokens
from warpsmith.backend.sampling import Sampling
from warpsmith.draft.base import Proposer
from warpsmith.engine.sequence import Sequence
from warpsmith.errors import BadRequest, ContextFull, DoesNotFit

MAX_SNAPSHOTS = 4
MAX_SNAPSHOT_BYTES = 2 << 30  # of all but the newest together
PIECE = 2048  # tokens prefilled in one call: bounds the features in memory and the wait for an interrupt
TAIL = 16  # a chat prompt ends in a few tokens that the next turn's prompt replaces; snapshots stay clear of them


@dataclass(frozen=True, eq=False)
class _Saved:
    ids: np.ndarray
    state: Snapshot
    draft: Any


class Conversation:
    """A state with its history. Requests run on it one after another, each beginning with `begin`."""

    def __init__(self, backend: Backend, context: int, proposer: Proposer | None = None) -> None:
        self.backend, self.context, self.proposer = backend, context, proposer
        self.turn = 0  # counts requests: an old one must not go on once a new one has begun
        self._sequence: Sequence | None = self._new_sequence()
        self._sound = True  # False while the state is being changed, and after such a change was broken off
        self._saved: list[_Saved] = []  # least recently used first
        self._answer_stays = False  # the next turn of this conversation goes on from the answer
        self._decoding: Iterator[int] = iter(())
        self._decoded_from = 0

    @property
    def sequence(self) -> Sequence:
        if self._sequence is None:
            self._sequence = self._new_sequence()
        return self._sequence

    def _new_sequence(self) -> Sequence:
        state = self.backend.new_state(self.context)
        return Sequence([], state, None if self.proposer is None else self.proposer.new_memory())

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Wrap every change of the state. If one is interrupted, the next request starts from a snapshot."""
        was_sound, self._sound = self._sound, False
        yield
        self._sound = was_sound

    def check(self, prompt: abc.Sequence[int]) -> None:
        """Refuse a prompt that cannot be run."""
        if not len(prompt):
            raise BadRequest("The prompt is empty.", "Pass at least one token.")
        check_tokens(self.backend.config, np.asarray(prompt, dtype=np.int64))
        if len(prompt) >= self.context:
            raise ContextFull(
                f"A prompt of {len(prompt)} tokens leaves no room for an answer in a context of {self.context}.",
                "Raise the context length (-c) or shorten the prompt."
                if self.context < self.backend.config.context
                else "Shorten the prompt: the model has no longer context.",
            )

    def begin(
        self,
        prompt: abc.Sequence[int],
        want: Want,
        kept: int | None = None,
        on_piece: Callable[[int], None] | None = None,
    ) -> tuple[Output, int]:
        """Make `prompt` the committed past. Returns the output for its last token, and how many tokens were reused.

        `kept` says how many of its tokens the prompt of the next turn will begin with: all of them if that goes on from
        the answer. Where nobody knows, all but a few.
        `on_piece` is told how many tokens are done before each piece; it may raise, and nothing is lost.
        """
        self.turn += 1
        self.settle()
        tokens = np.asarray(prompt, dtype=np.int64)
        shared = common_prefix(tokens, self.sequence.ids)
        start = cached = self._return_to(tokens)
        self._answer_stays = kept is not None and kept >= len(tokens)
        self.sequence.ids = tokens.tolist()
        end = len(tokens)
        # Worth coming back to: where this prompt left the last one, as the next may too, and its own end.
        kept = end - TAIL if kept is None else min(kept, end - 1)
        points = {p for p in map(self._floor, (shared, kept)) if p > start}
        for cut in sorted({*points, *range(start - start % PIECE + PIECE, end, PIECE), end}):
            if on_piece is not None:
                on_piece(start)
            wanted = want if cut == end else replace(want, tokens="none")
            with self.changing():
                output = self.backend.prefill(self.sequence.state, self.sequence.ids[start:cut], wanted)
                self._observe(start, output, slice(None))
                if self.proposer is not None:
                    self.proposer.catch_up(self.sequence.draft, self.sequence.state)
            if cut in points:
                self._save()
            start = cut
        return output, cached

    def advance(self, path: list[int], run: list[int], output: Output) -> None:
        """Append the tokens that were decided and commit the nodes they were decided at, all tokens but the last."""
        start = self.sequence.state.length
        with self.changing():
            self.sequence.ids.extend(run)
            self.backend.commit(self.sequence.state, path)
            self._observe(start, output, path)

    def recent(self, sampling: Sampling) -> list[int]:
        """The end of the text that the penalties look at."""
        last = sampling.repeat_last_n
        return [] if not sampling.penalised else self.sequence.ids if last < 0 else self.sequence.ids[-last:]

    def decode(self, count: int, stop_ids: frozenset[int], sampling: Sampling) -> Iterator[int]:
        """Tokens as the backend makes them, up to `count` or a stop id; all but the last are committed.

        `settle` ends it, wherever it stands."""
        self._decoded_from = self.sequence.state.length
        decoding = self._decoding = self.backend.decode(
            self.sequence.state, self.sequence.ids[-1], count, stop_ids, sampling, self.recent(sampling)
        )
        while True:
            with self.changing():
                token = next(decoding, None)
            if token is None:
                return
            self.sequence.ids.append(token)
            yield token

    def settle(self) -> None:
        """Break off decoding: a backend that has run ahead goes back to the last token it gave out."""
        if isinstance(self._decoding, Generator):
            with self.changing():
                self._decoding.close()
                self._decoding = iter(())
                if self.sequence.state.length > self._decoded_from:
                    self._observe(self._decoded_from, Output(), slice(None))

    def _observe(self, start: int, output: Output, rows: slice | list[int]) -> None:
        if self.proposer is not None:
            features = None if output.features is None else output.features[rows]
            hidden = None if output.hidden is None else output.hidden[rows]
            sequence = self.sequence
            self.proposer.observe(sequence.draft, sequence.committed[start:], start, features, hidden)

    def _return_to(self, tokens: np.ndarray) -> int:
        """Go to the longest past that `tokens` continue: the live state, a snapshot, or nothing. Returns its length."""
        live = self.sequence.committed if self._sound else None
        fitting = [s for s in self._saved if _continues(tokens, s.ids)]
        best = max(fitting, key=lambda s: len(s.ids), default=None)
        if live is not None and _continues(tokens, live) and (best is None or len(live) >= len(best.ids)):
            return len(live)
        if live and self._answer_stays:
            self._save()  # another conversation comes between; this one may go on later
        self._sound = False
        if best is not None:
            self._saved.remove(best)
            self._saved.append(best)
            self.backend.restore(self.sequence.state, best.state)
            if self.proposer is not None:
                self.proposer.restore(self.sequence.draft, best.draft)
        else:
            self._sequence = None  # first give back the memory of the old one
        self._sound = True
        return self.sequence.state.length

    def _floor(self, length: int) -> int:
        return length - length % self.backend.prefill_multiple

    def _save(self) -> None:
        ids = np.array(self.sequence.committed, dtype=np.int32)
        self._saved = [s for s in self._saved if not np.array_equal(s.ids, ids)]
        try:
            snapshot = self.backend.snapshot(self.sequence.state)
        except DoesNotFit:
            return  # it only saves time later
        draft = None if self.proposer is None else self.proposer.snapshot(self.sequence.draft)
        self._saved.append(_Saved(ids, snapshot, draft))
        while len(self._saved) > MAX_SNAPSHOTS or sum(s.state.nbytes for s in self._saved[:-1]) > MAX_SNAPSHOT_BYTES:
            del self._saved[0]


def _continues(tokens: np.ndarray, past: np.ndarray | list[int]) -> bool:
    """Whether `tokens` are `past` and at least one more, whose output the request will need."""
    return len(past) < len(tokens) and bool((tokens[: len(past)] == past).all())


def common_prefix(a: abc.Sequence[int] | np.ndarray, b: abc.Sequence[int]) -> int:
    """How many tokens two texts begin with in common."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:length], dtype=np.int64) != np.asarray(b[:length], dtype=np.int64))
    return int(differ[0]) if len(differ) else length
