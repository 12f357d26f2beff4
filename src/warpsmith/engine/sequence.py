"""One sequence on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from warpsmith.backend.base import State


@dataclass
class Sequence:
    """The text, what the backend keeps of it, and what the proposer remembers of it. Data: any number run side by side
    on one backend and one proposer."""

    ids: list[int]  # committed tokens, then any that are decided but not yet run
    state: State
    draft: Any = None  # the proposer's memory

    @property
    def committed(self) -> list[int]:
        """The tokens in the state."""
        return self.ids[: self.state.length]
