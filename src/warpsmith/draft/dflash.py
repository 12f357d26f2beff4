"""DFlash: a few layers that fill a block of masked positions at once, from features of the target's layers.

The features of every committed token are projected once into each layer's keys and values and kept in rolling caches,
so a guess costs the same at any length of text, and so does the memory. The draft block itself leaves nothing behind.
The draft has no embeddings and no head of its own: the target lends both. The network is the backend's, where it runs
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from warpsmith.backend.base import Backend, State, Want
from warpsmith.backend.block_draft import BlockMemory, GrowingTree
from warpsmith.backend.reference.dflash import NumpyDraft
from warpsmith.backend.rows import Rows
from warpsmith.backend.tree import MAX_NODES
from warpsmith.checkpoint.dflash import DFlashConfig, DraftFile
from warpsmith.draft.base import Context, Draft, ScoredTree
from warpsmith.draft.ddtree import best_tree, marginals
from warpsmith.model.dflash import check_fits

CONTEXT_ROWS = 4096  # tokens that layers without a window look back on: drafts are trained on no more
WIDTH = 16  # tokens considered at each depth
WAITING_BYTES = 64 << 20  # of features kept before they are projected
PIECE = 256  # rows projected at a time


def capacity_of(config: DFlashConfig, context_rows: int = CONTEXT_ROWS) -> list[int]:
    """Of how many tokens each layer keeps keys and values."""
    return [context_rows if window is None else min(window, context_rows) for window in config.windows]


@dataclass
class DFlashMemory:
    """What the network has seen of a sequence, and the rows it has yet to see."""

    network: BlockMemory
    waiting: list[tuple[int, Rows]] = field(default_factory=list)  # (position, features) yet to be projected
    position: int = 0  # of the next token
    growing: GrowingTree | None = None  # the last, until it is known what became of it


class DFlash(Draft[DFlashMemory]):
    """Feeds the network what was committed, and makes a tree of what it believes."""

    name = "dflash"

    def __init__(
        self, file: DraftFile, backend: Backend, nodes: int = MAX_NODES - 1, context_rows: int = CONTEXT_ROWS
    ) -> None:
        check_fits(file.config, backend.config)
        self.config, self.backend, self.nodes = file.config, backend, nodes
        self.wants = Want(tokens="none", features=file.config.target_layers)
        capacity = capacity_of(file.config, context_rows)
        self._longest = max(capacity)
        self._tree_seconds = 0.0
        self.network = backend.block_draft(file.config, file.tensors, capacity) or NumpyDraft(file, backend, capacity)
        self.keeps_up = self.network.at_once

    # -- what was committed -------------------------------------------------------------------------------------------

    def new_memory(self) -> DFlashMemory:
        return DFlashMemory(self.network.new_memory())

    def snapshot(self, memory: DFlashMemory) -> Any:
        return self.network.snapshot(memory.network), list(memory.waiting), memory.position

    def restore(self, memory: DFlashMemory, saved: Any) -> None:
        network, waiting, memory.position = saved
        self.network.restore(memory.network, network)
        memory.waiting = list(waiting)

    def observe(
        self,
        memory: DFlashMemory,
        tokens: Sequence[int],
        position: int,
        features: Rows | None,
        hidden: Rows | None,
    ) -> None:
        if position != memory.position:
            self.network.forget(memory.network)
            memory.waiting = []
        memory.position = position + len(tokens)
        if memory.growing is not None and memory.growing.verified is not None:
            self._tree_seconds += memory.growing.verified.tree_seconds
        memory.growing = None
        if features is None:
            return  # a gap: the rows before it still stand where they stood
        seen = features[-self._longest :]  # what no layer could see any more is not worth projecting
        if self.network.at_once:
            self.network.append(memory.network, seen, memory.position - len(seen))
            return
        memory.waiting.append((memory.position - len(seen), seen.keep()))
        while sum(len(rows) for _, rows in memory.waiting[1:]) >= self._longest:
            del memory.waiting[0]
        if sum(rows.nbytes for _, rows in memory.waiting) > WAITING_BYTES:
            self._project_waiting(memory)

    def catch_up(self, memory: DFlashMemory, state: State) -> None:
        self._project_waiting(memory)
        self.network.catch_up(memory.network)

    def _project_waiting(self, memory: DFlashMemory) -> None:
        for start, features in memory.waiting:
            for i in range(0, len(features), PIECE):
                self.network.append(memory.network, features[i : i + PIECE], start + i)
        memory.waiting = []

    # -- what comes next ----------------------------------------------------------------------------------------------

    def propose(self, memory: DFlashMemory, context: Context) -> ScoredTree | GrowingTree | None:
        self._project_waiting(memory)
        rows, position = min(self.config.block - 1, context.depth), len(context.ids) - 1
        width = min(WIDTH, self.nodes, self.config.speaks or self.backend.config.vocab)
        if context.unseen:
            least = [] if context.prices is None else context.prices.least
            run = min(self.nodes, context.nodes - 1)
            growing = self.network.grow(memory.network, context.root, position, rows, width, self.nodes, run, least)
            if growing is not None:
                memory.growing = growing
                return growing
        output = self.network.fill(memory.network, context.root, position, rows, Want(tokens="top", top=width))
        before = perf_counter()
        tree = best_tree(context.root, *marginals(output), self.nodes, prices=context.prices)
        self._tree_seconds += perf_counter() - before
        return tree

    def tree_seconds(self) -> float:
        return self._tree_seconds

    def hidden(self, memory: DFlashMemory, root: int, position: int) -> np.ndarray:
        """The block's rows after the last norm, float32 [block, hidden]; row j is about the token at position + j."""
        want, rows = Want(tokens="none", hidden=True), self.config.block - 1
        hidden = self.network.fill(memory.network, root, position, rows, want).hidden
        assert hidden is not None
        return hidden.numpy()
