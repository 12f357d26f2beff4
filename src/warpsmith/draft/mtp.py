"""The model's own multi-token-prediction head as a draft: one small block that guesses the token after the next.

A row of the block takes a token and the trunk's hidden of the position before it, and its own keys and values stay in
the state. Its output feeds the next row, so it can run ahead of the trunk for several steps. Rows of tokens that were
then not accepted are overwritten by the true ones. RoPE only sees distances, so the block's rows are counted from
wherever it began to listen, which need not be the beginning of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from time import perf_counter
from typing import Any

import numpy as np

from warpsmith.backend.base import Backend, State, Want
from warpsmith.backend.rows import Rows
from warpsmith.backend.tree import MAX_NODES
from warpsmith.draft.base import Context, Draft, Prices, ScoredTree
from warpsmith.draft.ddtree import best_tree, marginals
from warpsmith.errors import BadRequest

STEPS = 8  # rows run ahead, at most
FAINT = 0.1  # a chain less likely than this is not worth another step, where nobody knows what it costs
WIDTH = 8  # tokens considered at each depth
LISTENS = 2048  # rows that may wait for the block; of a longer past only the end is heard


class MTP(Draft):
    """Runs the block along the likeliest chain and makes a tree of what it believes at each depth."""

    name = "mtp"
    wants = Want(tokens="none", hidden=True)

    def __init__(self, backend: Backend, nodes: int = MAX_NODES - 1) -> None:
        if not backend.config.mtp_layers:
            raise BadRequest("This model has no MTP head to draft with.", "Use --draft ngram, or a draft model.")
        if type(backend).mtp is Backend.mtp:
            raise BadRequest(f"The {backend.name} backend does not run MTP heads.", "Use --draft ngram.")
        self.backend, self.nodes = backend, nodes
        self._row_seconds = 0.0
        self.reset()

    def reset(self) -> None:
        self._rows = 0  # in the block's keys and values, counted from where it began to listen
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []  # (tokens, the hidden before each) yet to be run
        self._hidden: np.ndarray | None = None  # of the last committed token [1, hidden]
        self._position = 0  # of the next token

    def snapshot(self) -> Any:
        return self._rows, list(self._waiting), self._hidden, self._position

    def restore(self, saved: Any) -> None:
        self._rows, waiting, self._hidden, self._position = saved
        self._waiting = list(waiting)

    def observe(self, tokens: Sequence[int], position: int, features: Rows | None, hidden: Rows | None) -> None:
        if position != self._position:
            self.reset()
        if hidden is None:  # a gap, which is left out: to the block it is as if these tokens had never been
            self._hidden, self._position = None, position + len(tokens)
            return
        ids, rows = np.asarray(tokens, dtype=np.int32), hidden.numpy()
        before = rows[:-1] if self._hidden is None else np.concatenate([self._hidden, rows[:-1]])
        if len(before):
            self._waiting.append((ids[-len(before) :], before))
        self._hidden = rows[-1:].copy()
        self._position = position + len(ids)
        while len(self._waiting) > 1 and sum(len(t) for t, _ in self._waiting[1:]) >= LISTENS:
            del self._waiting[0]
            self._rows = 0

    def catch_up(self, state: State) -> None:
        if self._waiting:
            tokens, before = self._take()
            self.backend.mtp(state, tokens.tolist(), before, self._rows, Want(tokens="none"))
            self._rows += len(tokens)

    def propose(self, context: Context) -> ScoredTree | None:
        state, steps = context.state, min(STEPS, context.depth, self.nodes)
        if self._hidden is None or self._position != len(context.ids) - 1:
            return None
        self._waiting.append((np.array([context.root], dtype=np.int32), self._hidden))
        tokens, hidden = self._take()
        want = Want(tokens="top", top=min(WIDTH, self.nodes, self.backend.config.vocab), hidden=True)
        ids: list[np.ndarray] = []
        log_probs: list[np.ndarray] = []
        row, likely = self._rows, 0.0
        self._rows += len(tokens) - 1  # the root's row is run again when it is committed
        while True:
            before = perf_counter()
            output = self.backend.mtp(state, tokens.tolist(), hidden, row, want)
            self._row_seconds += 0.1 * (perf_counter() - before - self._row_seconds)
            here, beliefs = marginals(output)
            ids.append(here)
            log_probs.append(beliefs)
            likely += float(beliefs[0, 0])
            row += len(tokens)
            # the block's row `row` stands for a position; a state has one for each position there is room for
            if len(ids) == steps or exp(likely) < self._faint(context.prices, len(ids)) or row >= state.context:
                ids_by_depth, beliefs_by_depth = np.concatenate(ids), np.concatenate(log_probs)
                return best_tree(context.root, ids_by_depth, beliefs_by_depth, self.nodes, prices=context.prices)
            assert output.hidden is not None
            tokens, hidden = here[0, :1], output.hidden[-1:].numpy()

    def _faint(self, prices: Prices | None, steps: int) -> float:
        """How unlikely a chain must be not to be worth another step: for its own cost, and for that of verifying it."""
        return FAINT if prices is None else self._row_seconds / prices.token + prices.nodes[steps]

    def _take(self) -> tuple[np.ndarray, np.ndarray]:
        waiting, self._waiting = self._waiting, []
        return np.concatenate([t for t, _ in waiting]), np.concatenate([h for _, h in waiting])
