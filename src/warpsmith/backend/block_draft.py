"""The contract with a draft that guesses a block of positions at once, and with trees that it grows on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from warpsmith.backend.rows import Rows
from warpsmith.backend.sampling import Sampling
from warpsmith.backend.tree import Tree

if TYPE_CHECKING:
    from warpsmith.backend.base import Output, State, Want


@dataclass(frozen=True)
class Verified:
    """What became of a tree that nobody had seen before: the tree, the sampler's way through it, and its times."""

    tokens: np.ndarray  # int32: of all nodes that grew, best first, as `parents`
    parents: np.ndarray
    scores: np.ndarray  # float64: the log of the probability of the path to each node; 0 for the root
    tree: Tree  # the first of them, which were run
    output: Output  # features and hidden of the tree's nodes
    path: list[int]  # as `Backend.verify` returns them
    decided: list[int]
    draft_seconds: float | None  # up to the beliefs that it grew from, where the device knows
    tree_seconds: float
    forward_seconds: float
    commit_seconds: float  # of the commit before


class GrowingTree(ABC):
    """A tree that a draft grows on the device and nobody looks at before it is verified: from the draft's beliefs to
    the tokens that are decided the host does not wait once."""

    nodes: int  # that are run at most, the root among them
    verified: Verified | None = None  # once it is

    @abstractmethod
    def verify(
        self, state: State, want: Want, sampling: Sampling | None, history: Sequence[int], stop: frozenset[int]
    ) -> Verified:
        """Run the tree on the state, follow the sampler through it up to a token in `stop`, and get the path ready for
        `commit`, which may take a shorter one. `want` and `history` are those of `forward` and `verify`."""

    @abstractmethod
    def instead(self, tree: Tree) -> None:
        """Run this tree in its place, of `nodes` at most: the draft's own has cost what it costs."""


class BlockMemory(ABC):  # noqa: B024  every backend keeps its own
    """What a `BlockDraft` has seen of one sequence."""


class BlockDraft(ABC):
    """A network that guesses a block of positions at once (DFlash): weights that any number of sequences share."""

    at_once: bool = False  # rows are best appended as soon as they are committed, where they are; else they may wait

    @abstractmethod
    def new_memory(self) -> BlockMemory:
        """Of a sequence that has not begun."""

    @abstractmethod
    def append(self, memory: BlockMemory, features: Rows, position: int) -> None:
        """Rows [n, features * hidden] of tokens that were committed at `position` onwards; later ones come later."""

    def catch_up(self, memory: BlockMemory) -> None:
        """Work through what was appended, now rather than when the next block is filled."""
        return

    @abstractmethod
    def fill(self, memory: BlockMemory, root: int, position: int, rows: int, want: Want) -> Output:
        """What may stand at the next `rows` positions after `root`, which stands at `position`: a row of tokens for
        each, and rows of `hidden` for the root and each. The whole block is computed and nothing of it is kept."""

    def grow(
        self, memory: BlockMemory, root: int, position: int, rows: int, width: int, nodes: int, verified: int,
        least: Sequence[float],
    ) -> GrowingTree | None:  # fmt: skip
        """What `fill` with the best `width` tokens of each row would give, made into DDTree's tree on the device: up to
        `nodes` below the root, each of a path at least as likely as `least` says by the nodes before it, and of them
        the first `verified` to be run. None where the host has to make it."""
        return None

    @abstractmethod
    def forget(self, memory: BlockMemory) -> None:
        """Make it that of a sequence that has not begun."""

    @abstractmethod
    def snapshot(self, memory: BlockMemory) -> Any: ...

    @abstractmethod
    def restore(self, memory: BlockMemory, saved: Any) -> None: ...
