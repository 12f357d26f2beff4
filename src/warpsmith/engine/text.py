"""From tokens to text that may be shown: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from warpsmith.errors import BadRequest

if TYPE_CHECKING:
    from warpsmith.model.tokenizer import Tokenizer


class Text:
    """Tokens to text that may be shown: whole characters, nothing of a stop string."""

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str]) -> None:
        self._detokenizer = None if tokenizer is None else tokenizer.stream(skip_special=True)
        self._stop = StopStrings(stops)
        self._ready = ""

    @property
    def hit(self) -> str | None:
        """The stop string that ended the text."""
        return self._stop.hit

    def push(self, token: int) -> bool:
        """Take a token; True when it completes a stop string."""
        if self._detokenizer is not None:
            self._ready += self._stop.push(self._detokenizer.push(token))
        return self.hit is not None

    def take(self) -> str:
        ready, self._ready = self._ready, ""
        return ready

    def finish(self) -> str:
        if self._detokenizer is not None:
            self._ready += self._stop.push(self._detokenizer.finish()) + self._stop.finish()
        return self.take()


class StopStrings:
    """Cuts a stream of text before the first stop string to become complete, however the stream is chopped.

    Of two that become complete with the same character the longer wins, because it began earlier.

    >>> stop = StopStrings(["\\n\\n"])
    >>> [stop.push(text) for text in ("one\\n", "two\\n", "\\nthree")], stop.hit
    (['one', '\\ntwo', ''], '\\n\\n')
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if any(not stop for stop in stops):
            raise BadRequest("A stop string is empty.", "Leave it out to generate without stop strings.")
        self.stops = tuple(stops)
        self.hit: str | None = None  # the stop string that ended the text
        self._held = ""  # an end of the text so far that is a beginning of some stop string

    def push(self, text: str) -> str:
        """Take more text, return what is safe to show. After a hit there is no more."""
        if not self.stops:
            return text
        if self.hit is not None:
            return ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.hit = min(found)
            self._held = ""
            return text[:at]
        hold = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def finish(self) -> str:
        """No more text comes: what was held back was no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
