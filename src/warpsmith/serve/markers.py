"""Searching a stream for markers that may be cut anywhere."""

from __future__ import annotations

from collections.abc import Iterable


def first_of(text: str, markers: Iterable[str]) -> tuple[int, str] | None:
    """Where the first marker is, and which; of two at one place the longer."""
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker)) >= 0]
    if not found:
        return None
    at, _, marker = min(found)
    return at, marker


def unfinished(text: str, markers: Iterable[str]) -> int:
    """The length of the longest end of `text` that is a proper beginning of a marker."""
    return max((_overlap(text, marker) for marker in markers), default=0)


def _overlap(text: str, marker: str) -> int:
    longest = min(len(marker) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
