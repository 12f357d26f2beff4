"""From the text of an answer to its parts: thoughts, text, tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from warpsmith.serve.reasoning import CLOSE, OPEN, Content, Reasoning, ReasoningSplitter
from warpsmith.serve.tools import IMPLIED, CallArguments, CallEnd, CallStart, Event, ToolParser

Part = Reasoning | Event

__all__ = ["AnswerParser", "CallArguments", "CallEnd", "CallStart", "Content", "Part", "Reasoning", "opens_thinking"]


class AnswerParser:
    """One answer as it streams. `thinking`: the prompt has opened a block of thoughts. Without `tools` nothing is
    taken for a tool call."""

    def __init__(self, thinking: bool, tools: Mapping[str, Any] | None = None) -> None:
        self._reasoning = ReasoningSplitter(thinking, IMPLIED if tools else ())
        self._tools = ToolParser(tools) if tools else None

    @property
    def thinking(self) -> bool:
        return self._reasoning.thinking

    @property
    def calls(self) -> int:
        return self._tools.calls if self._tools else 0

    def push(self, text: str) -> list[Part]:
        return self._parse(self._reasoning.push(text))

    def finish(self) -> list[Part]:
        parts = self._parse(self._reasoning.finish())
        return [*parts, *self._tools.finish()] if self._tools else parts

    def _parse(self, pieces: Iterable[Reasoning | Content]) -> list[Part]:
        parts: list[Part] = []
        for piece in pieces:
            if isinstance(piece, Content) and self._tools:
                parts += self._tools.push(piece.text)
            else:
                parts.append(piece)
        return parts


def opens_thinking(prompt: str) -> bool:
    """Whether a rendered prompt ends within a block of thoughts."""
    return prompt.rfind(OPEN) > prompt.rfind(CLOSE) and prompt.rstrip().endswith(OPEN)
