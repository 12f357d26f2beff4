"""A tree of candidate tokens: what one forward pass is asked about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from warpsmith.errors import BadRequest

MAX_NODES = 64

_NO_PARENT, _NO_DEPTH = np.array([-1], dtype=np.int32), np.array([0], dtype=np.int32)
_NO_PARENT.flags.writeable = _NO_DEPTH.flags.writeable = False


@dataclass(frozen=True)
class Tree:
    """Token ids and parent indices. Node 0 is the root (`parents[0] == -1`); parents precede their children.

    Node i stands at position `state.length + depth(i)`. A chain is a tree; plain decoding is a tree of one node.
    """

    tokens: np.ndarray  # int32 [n]
    parents: np.ndarray  # int32 [n]

    def __post_init__(self) -> None:
        tokens = np.ascontiguousarray(self.tokens, dtype=np.int32)
        parents = np.ascontiguousarray(self.parents, dtype=np.int32)
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "parents", parents)
        n = len(tokens)
        if tokens.ndim != 1 or parents.shape != tokens.shape or not 1 <= n <= MAX_NODES:
            raise BadRequest(f"A tree has 1 to {MAX_NODES} nodes with one parent each; this one has {n} tokens.")
        above = parents.tolist()
        if above[0] != -1 or any(not 0 <= parent < node for node, parent in enumerate(above[1:], start=1)):
            raise BadRequest("A tree's parents must precede their children, and only node 0 is a root.")

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> Tree:
        n = len(tokens)
        return cls(np.array(tokens, dtype=np.int32), np.arange(-1, n - 1, dtype=np.int32))

    @classmethod
    def root(cls, token: int) -> Tree:
        """A tree of one node. Plain decoding makes one for every token, so nothing is checked or worked out here."""
        tree = object.__new__(cls)
        tree.__dict__.update(
            tokens=np.array([token], dtype=np.int32),
            parents=_NO_PARENT,
            _depths=_NO_DEPTH,
            height=1,
            child={(-1, token): 0},
        )
        return tree

    @classmethod
    def made(cls, tokens: np.ndarray, parents: np.ndarray) -> Tree:
        """Of arrays of int32 that whoever made them knows to be a tree: nothing is checked."""
        tree = object.__new__(cls)
        tree.__dict__.update(tokens=tokens, parents=parents)
        return tree

    def __len__(self) -> int:
        return len(self.tokens)

    def depths(self) -> np.ndarray:
        """int32 [n]: 0 for the root."""
        return self._depths

    @cached_property
    def _depths(self) -> np.ndarray:
        depths = [0]
        for parent in self.parents[1:].tolist():
            depths.append(depths[parent] + 1)
        return np.array(depths, dtype=np.int32)

    @cached_property
    def height(self) -> int:
        """Nodes of the longest path."""
        return max(self._depths.tolist()) + 1

    def path(self, node: int) -> list[int]:
        """Node indices from the root to `node`, both included."""
        path = [node]
        while (parent := int(self.parents[path[-1]])) >= 0:
            path.append(parent)
        return path[::-1]

    def trimmed(self, depth: int, nodes: int) -> Tree:
        """Its first nodes, without those below `depth`."""
        keep = np.flatnonzero(self._depths <= depth)[:nodes]
        if len(keep) == len(self):
            return self
        new_index = np.full(len(self) + 1, -1)  # one more for the root's parent, -1
        new_index[keep] = np.arange(len(keep))
        return Tree(self.tokens[keep], new_index[self.parents[keep]])

    @cached_property
    def child(self) -> dict[tuple[int, int], int]:
        """(parent, token) -> node. Of siblings with the same token the first counts."""
        children: dict[tuple[int, int], int] = {}
        for node, edge in enumerate(zip(self.parents.tolist(), self.tokens.tolist(), strict=True)):
            children.setdefault(edge, node)
        return children
