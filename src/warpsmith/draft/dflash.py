"""DFlash: a few layers that fill a block of masked positions at once, from features of the target's layers.

The features of every committed token are projected once into each layer's keys and values and kept in rings, so a
guess costs the same at any length of text, and so does the memory. The block itself leaves nothing behind. The draft
has no embeddings and no head of its own: the target lends both. The network is the backend's, where it runs one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from warpsmith.backend.base import Backend, State, Want
from warpsmith.backend.rows import Rows
from warpsmith.backend.tree import MAX_NODES
from warpsmith.draft.base import Context, Draft, ScoredTree
from warpsmith.draft.ddtree import best_tree, marginals
from warpsmith.draft.dflash_files import DraftFile, check_fits
from warpsmith.draft.dflash_numpy import NumpyDraft

CONTEXT_ROWS = 4096  # tokens that layers without a window look back on: drafts are trained on no more
WIDTH = 16  # tokens considered at each depth
WAITING_BYTES = 64 << 20  # of features kept before they are projected
PIECE = 256  # rows projected at a time


class DFlash(Draft):
    """Feeds the network what was committed, and makes a tree of what it believes."""

    name = "dflash"

    def __init__(
        self, file: DraftFile, backend: Backend, nodes: int = MAX_NODES - 1, context_rows: int = CONTEXT_ROWS
    ) -> None:
        check_fits(file.config, backend.config)
        self.config, self.backend, self.nodes = file.config, backend, nodes
        self.wants = Want(tokens="none", features=file.config.target_layers)
        capacity = [context_rows if w is None else min(w, context_rows) for w in file.config.windows]
        self._longest = max(capacity)
        self.network = backend.block_draft(file.config, file.tensors, capacity) or NumpyDraft(file, backend, capacity)
        self.reset()

    # -- what was committed -------------------------------------------------------------------------------------------

    def reset(self) -> None:
        self.network.forget()
        self._waiting: list[tuple[int, Rows]] = []  # (position, features) yet to be projected
        self._position = 0  # of the next token

    def snapshot(self) -> Any:
        return self.network.snapshot(), list(self._waiting), self._position

    def restore(self, saved: Any) -> None:
        network, waiting, self._position = saved
        self.network.restore(network)
        self._waiting = list(waiting)

    def observe(self, tokens: Sequence[int], position: int, features: Rows | None, hidden: Rows | None) -> None:
        if position != self._position:
            self.reset()
        self._position = position + len(tokens)
        if features is None:
            return  # a gap: the rows before it still stand where they stood
        kept = features[-self._longest :].keep()  # what no layer could see any more is not worth projecting
        self._waiting.append((self._position - len(kept), kept))
        while sum(len(rows) for _, rows in self._waiting[1:]) >= self._longest:
            del self._waiting[0]
        if sum(rows.nbytes for _, rows in self._waiting) > WAITING_BYTES:
            self._project_waiting()

    def catch_up(self, state: State) -> None:
        self._project_waiting()

    def _project_waiting(self) -> None:
        for start, features in self._waiting:
            for i in range(0, len(features), PIECE):
                self.network.append(features[i : i + PIECE], start + i)
        self._waiting = []

    # -- what comes next ----------------------------------------------------------------------------------------------

    def propose(self, context: Context) -> ScoredTree | None:
        self._project_waiting()
        rows = min(self.config.block - 1, context.depth)
        width = min(WIDTH, self.nodes, self.backend.config.vocab)
        output = self.network.fill(context.root, len(context.ids) - 1, rows, Want(tokens="top", top=width))
        return best_tree(context.root, *marginals(output), self.nodes, prices=context.prices)

    def hidden(self, root: int, position: int) -> np.ndarray:
        """The block's rows after the last norm, float32 [block, hidden]; row j is about the token at position + j."""
        rows = self.config.block - 1
        hidden = self.network.fill(root, position, rows, Want(tokens="none", hidden=True)).hidden
        assert hidden is not None
        return hidden.numpy()
