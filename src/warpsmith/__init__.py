"""warpsmith: local LLM inference, hand-written for the chip in front of you."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from warpsmith.llm import LLM, Completion, load

__all__ = ["LLM", "Completion", "__version__", "load"]


def __getattr__(name: str) -> object:
    """Import the engine only when it is used: `warpsmith --help` should not wait for numpy."""
    if name in ("LLM", "Completion", "load"):
        from warpsmith import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'warpsmith' has no attribute {name!r}")
