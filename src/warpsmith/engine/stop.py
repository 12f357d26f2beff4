"""Stop strings in streamed text: nothing that could be the beginning of one is let out before it is known not to be."""

from __future__ import annotations

from collections.abc import Sequence

from warpsmith.errors import BadRequest


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
