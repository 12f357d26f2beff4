"""Who chooses a text's next token: the sampler, among what a constraint allows; and who looks on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from warpsmith.backend.base import LOGITS, Backend, Output, State, WantedTokens, next_token, walk, wanted_for
from warpsmith.backend.sampling import Sampling, choose
from warpsmith.backend.tree import Tree


class Constraint(Protocol):
    """What may come next, as a grammar says. Every token is decided in order and once, drafted or not, so a
    constraint never has to go back."""

    def allow(self, logits: np.ndarray) -> np.ndarray:
        """A row of logits with -inf for what may not come next; the row itself is not changed."""

    def took(self, token: int) -> None:
        """This is what came."""


class Chooser:
    """`on_logits` sees every token with the row of logits it was chosen from."""

    def __init__(
        self, sampling: Sampling, constraint: Constraint | None, on_logits: Callable[[np.ndarray, int], None] | None
    ) -> None:
        self.sampling, self.constraint, self.on_logits = sampling, constraint, on_logits
        self.on_host = constraint is not None or on_logits is not None  # somebody here looks at every row
        self.tokens: WantedTokens = LOGITS.tokens if self.on_host else wanted_for(sampling).tokens  # of a forward pass

    def recent(self, ids: list[int]) -> list[int]:
        """The end of the text that the penalties look at."""
        last = self.sampling.repeat_last_n
        return [] if not self.sampling.penalised else ids if last < 0 else ids[-last:]

    def at(self, output: Output, row: int, ids: list[int], length: int) -> int:
        """What comes after a state of this length, of which this row tells."""
        if self.constraint is None:
            return next_token(output, row, self.sampling, self.recent(ids), length)
        return self._constrained(output)(row, self.recent(ids), length)

    def along(
        self, backend: Backend, state: State, tree: Tree, output: Output, past: list[int]
    ) -> tuple[list[int], list[int]]:
        """The way through a drafted tree, and the tokens that it decides."""
        if self.constraint is None:
            return backend.verify(state, tree, self.sampling, past)
        return walk(tree, self._constrained(output), past, state.length)

    def _constrained(self, output: Output) -> Callable[[int, list[int], int], int]:
        constraint, logits = self.constraint, output.logits
        assert constraint is not None
        assert logits is not None

        def choose_at(row: int, text: list[int], position: int) -> int:
            token = choose(constraint.allow(logits.row(row)), self.sampling, text, position)
            constraint.took(token)
            return token

        return choose_at

    def show(self, output: Output, rows: list[int], run: list[int]) -> None:
        if self.on_logits is not None:
            assert output.logits is not None or not run
            for row, token in zip(rows, run, strict=False):
                self.on_logits(output.logits.row(row), token)  # type: ignore[union-attr]
