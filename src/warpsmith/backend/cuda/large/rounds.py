"""Trees of more nodes than one launch takes: cut into parts that do.

A part is a subtree. It runs on top of the path above its root, which is committed beside the state for as long. Its
root and what joins its nodes may have run before: they run again, and have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Round:
    """Nodes of a tree by their numbers in it."""

    path: list[int]  # above the first of `nodes`, from the tree's root on
    nodes: list[int]  # that run, parents before their children
    parents: list[int]  # where in `nodes` theirs is; the first has none: -1


def rounds_of(parents: Sequence[int], most: int) -> list[Round]:
    """Rounds of at most `most` nodes, two or more; every node runs after its ancestors."""
    rounds: list[Round] = []
    part: set[int] = set()
    for node in _depth_first(parents):
        alone = {max(parents[node], 0), node}
        joined = _joined(parents, part, node) if part else alone
        if len(joined) > most:
            rounds.append(_round(parents, part))
            joined = alone
        part = joined
    return [*rounds, _round(parents, part)]


def _depth_first(parents: Sequence[int]) -> list[int]:
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)
    order, ahead = [], [0]
    while ahead:
        order.append(ahead.pop())
        ahead += reversed(children[order[-1]])
    return order


def _path(parents: Sequence[int], node: int) -> list[int]:
    """From the tree's root to a node."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def _joined(parents: Sequence[int], part: set[int], node: int) -> set[int]:
    """The smallest subtree with all of a subtree and this node."""
    top, path = _path(parents, min(part)), _path(parents, node)
    common = sum(a == b for a, b in zip(top, path, strict=False))
    return part | set(top[common - 1 :]) | set(path[common - 1 :])


def _round(parents: Sequence[int], part: set[int]) -> Round:
    nodes = sorted(part)
    place = {node: i for i, node in enumerate(nodes)}
    return Round(_path(parents, nodes[0])[:-1], nodes, [-1, *(place[parents[node]] for node in nodes[1:])])
