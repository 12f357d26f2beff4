"""The model's own multi-token-prediction head as a draft: one more layer that guesses the token after the next.

A row of the head takes a token and the trunk's hidden of the position before it, and its own keys and values stay in
the state. Its output feeds the next row, so it can run ahead of the trunk for several steps. Rows of tokens that were
then not accepted are overwritten by the true ones. RoPE only sees distances, so the head's rows are counted from
wherever it began to listen, which need not be the beginning of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
LISTENS = 2048  # rows that may wait for the head; of a longer past only the end is heard


@dataclass
class MTPMemory:
    """Where the head stands in a sequence; its keys and values are in the state."""

    rows: int = 0  # in the head's keys and values, counted from where it began to listen
    waiting: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)  # (tokens, the hidden before each)
    hidden: np.ndarray | None = None  # of the last committed token [1, hidden]
    position: int = 0  # of the next token

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """What waits to be run."""
        waiting, self.waiting = self.waiting, []
        return np.concatenate([t for t, _ in waiting]), np.concatenate([h for _, h in waiting])


class MTP(Draft[MTPMemory]):
    """Runs the head along the likeliest chain and makes a tree of what it believes at each depth."""

    name = "mtp"
    wants = Want(tokens="none", hidden=True)

    def __init__(self, backend: Backend, nodes: int = MAX_NODES - 1) -> None:
        if not backend.config.mtp_layers:
            raise BadRequest("This model has no MTP head to draft with.", "Use --draft ngram, or a draft model.")
        if not backend.runs_mtp:
            raise BadRequest(f"The {backend.name} backend does not run MTP heads.", "Use --draft ngram.")
        self.backend, self.nodes = backend, nodes
        self._row_seconds = self._tree_seconds = 0.0

    def new_memory(self) -> MTPMemory:
        return MTPMemory()

    def snapshot(self, memory: MTPMemory) -> Any:
        return replace(memory, waiting=list(memory.waiting))

    def restore(self, memory: MTPMemory, saved: Any) -> None:
        vars(memory).update(vars(self.snapshot(saved)))

    def observe(
        self,
        memory: MTPMemory,
        tokens: Sequence[int],
        position: int,
        features: Rows | None,
        hidden: Rows | None,
    ) -> None:
        if position != memory.position:
            self.restore(memory, MTPMemory())
        if hidden is None:  # a gap, which is left out: to the head it is as if these tokens had never been
            memory.hidden, memory.position = None, position + len(tokens)
            return
        ids, rows = np.asarray(tokens, dtype=np.int32), hidden.numpy()
        before = rows[:-1] if memory.hidden is None else np.concatenate([memory.hidden, rows[:-1]])
        if len(before):
            memory.waiting.append((ids[-len(before) :], before))
        memory.hidden = rows[-1:].copy()
        memory.position = position + len(ids)
        while len(memory.waiting) > 1 and sum(len(t) for t, _ in memory.waiting[1:]) >= LISTENS:
            del memory.waiting[0]
            memory.rows = 0

    def catch_up(self, memory: MTPMemory, state: State) -> None:
        if memory.waiting:
            tokens, before = memory.take()
            self.backend.mtp(state, tokens.tolist(), before, memory.rows, Want(tokens="none"))
            memory.rows += len(tokens)

    def propose(self, memory: MTPMemory, context: Context) -> ScoredTree | None:
        state, steps = context.state, min(STEPS, context.depth, self.nodes)
        if memory.hidden is None or memory.position != len(context.ids) - 1:
            return None
        memory.waiting.append((np.array([context.root], dtype=np.int32), memory.hidden))
        tokens, hidden = memory.take()
        want = Want(tokens="top", top=min(WIDTH, self.nodes, self.backend.config.vocab), hidden=True)
        ids: list[np.ndarray] = []
        log_probs: list[np.ndarray] = []
        row, likely = memory.rows, 0.0
        memory.rows += len(tokens) - 1  # the root's row is run again when it is committed
        while True:
            before = perf_counter()
            output = self.backend.mtp(state, tokens.tolist(), hidden, row, want)
            self._row_seconds += 0.1 * (perf_counter() - before - self._row_seconds)
            here, beliefs = marginals(output)
            ids.append(here)
            log_probs.append(beliefs)
            likely += float(beliefs[0, 0])
            row += len(tokens)
            # the head's row `row` stands for a position; a state has one for each position there is room for
            if len(ids) == steps or exp(likely) < self._faint(context.prices, len(ids)) or row >= state.context:
                ids_by_depth, beliefs_by_depth = np.concatenate(ids), np.concatenate(log_probs)
                before = perf_counter()
                tree = best_tree(context.root, ids_by_depth, beliefs_by_depth, self.nodes, prices=context.prices)
                self._tree_seconds += perf_counter() - before
                return tree
            assert output.hidden is not None
            tokens, hidden = here[0, :1], output.hidden[-1:].numpy()

    def tree_seconds(self) -> float:
        return self._tree_seconds

    def _faint(self, prices: Prices | None, steps: int) -> float:
        """How unlikely a chain must be not to be worth another step: for its own cost, and for that of verifying it."""
        return FAINT if prices is None else self._row_seconds / prices.token + prices.nodes[steps]
