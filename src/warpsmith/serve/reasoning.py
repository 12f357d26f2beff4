"""Splitting an answer into what the model thought and what it said, as the text streams in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from warpsmith.serve.markers import first_of, unfinished

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Reasoning:
    """A piece of what was thought."""

    text: str


@dataclass(frozen=True)
class Content:
    """A piece of what was said."""

    text: str


class _At(Enum):
    START = auto()  # the model may still open a block by itself
    INSIDE = auto()
    AFTER = auto()  # blank lines between the block and the answer belong to neither
    CONTENT = auto()


class ReasoningSplitter:
    """The pieces are the same however the stream is chopped. Blank lines around the block are dropped.

    `inside`: the prompt has opened a block already. `implied`: markers that end a block that was not closed, and
    belong to the content; models that call a tool sometimes forget to close it.
    """

    def __init__(self, inside: bool, implied: Sequence[str] = ()) -> None:
        self._at = _At.INSIDE if inside else _At.START
        self._ends = (CLOSE, *implied)
        self._held = ""
        self._begun = False  # something was thought

    @property
    def thinking(self) -> bool:
        return self._at is _At.INSIDE

    def push(self, text: str) -> list[Reasoning | Content]:
        self._held += text
        pieces: list[Reasoning | Content] = []
        if self._at is _At.START:
            start = self._held.lstrip()
            if start.startswith(OPEN):
                self._at, self._held = _At.INSIDE, start[len(OPEN) :]
            elif not OPEN.startswith(start):
                self._at = _At.CONTENT
        if self._at is _At.INSIDE and (thought := self._think()):
            pieces.append(Reasoning(thought))
        if self._at is _At.AFTER:
            self._held = self._held.lstrip("\n")
            if self._held:
                self._at = _At.CONTENT
        if self._at is _At.CONTENT and self._held:
            pieces.append(Content(self._held))
            self._held = ""
        return pieces

    def finish(self) -> list[Reasoning | Content]:
        """No more text comes: what could have been a marker was none."""
        held, self._held = self._held, ""
        if self._at is _At.INSIDE:
            return [Reasoning(held)] if held.strip() else []
        return [Content(held)] if held else []

    def _think(self) -> str:
        """Take what is known to be thought; spaces at the end wait, as they may be the last before the end."""
        if not self._begun:
            self._held = self._held.lstrip("\n")
        end = first_of(self._held, self._ends)
        if end is not None:
            at, marker = end
            thought = self._held[:at].rstrip()
            self._held = self._held[at + len(marker) if marker == CLOSE else at :]
            self._at = _At.AFTER
        else:
            thought = self._held[: len(self._held) - unfinished(self._held, self._ends)].rstrip()
            self._held = self._held[len(thought) :]
        self._begun = self._begun or bool(thought)
        return thought
