"""Where activations lie while SMs exchange them: the host's view of `exchange.cuh` and `shape.cuh`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from warpsmith.backend.cuda.shape import WARPS, chunks_of
from warpsmith.backend.tree import MAX_NODES

CHAIN, CHUNK_WORDS = 4, 128
NOT_YET = 0xFFFFFFFF  # what an exchanged word is before it has come


@dataclass(frozen=True)
class Area:
    """So many bf16 values and sums of squares a node."""

    k: int
    squares: int

    @property
    def square_words(self) -> int:
        return 8 * _square_stride(self.squares)

    @property
    def words(self) -> int:
        return self.square_words + chunks_of(self.k) * WARPS * CHUNK_WORDS


class Exchange:
    """Where eight nodes' activations lie while SMs exchange them (see shape.cuh): f32 `rows` of so many words a node,
    then `areas`."""

    def __init__(self, rows: Mapping[str, int], areas: Mapping[str, Area]) -> None:
        self.rows, self.areas = rows, areas
        self.row_starts, self.node_words = _places({name: _on_lines(words) for name, words in rows.items()})
        self.area_starts, area_words = _places({name: area.words for name, area in areas.items()})
        self.tile_words = 8 * self.node_words + area_words

    @property
    def bytes(self) -> int:
        return 2 * MAX_NODES // 8 * self.tile_words * 4

    def row(self, copy: np.ndarray, name: str, nodes: int) -> np.ndarray:
        """What one copy, as words, has of a kind of row: [nodes, words]."""
        node = np.arange(nodes)[:, None]
        at = self._node_tile(node) + node % 8 * self.node_words + self.row_starts[name]
        return copy[at + np.arange(self.rows[name])]

    def squares(self, copy: np.ndarray, name: str, nodes: int) -> np.ndarray:
        node, count = np.arange(nodes)[:, None], self.areas[name].squares
        return copy[self._area(name, node) + node % 8 * _square_stride(count) + np.arange(count)]

    def values(self, copy: np.ndarray, name: str, nodes: int) -> np.ndarray:
        """[nodes, k] in float32, out of the order of the mma's operands."""
        node, area = np.arange(nodes)[:, None], self.areas[name]
        chunks, pair = chunks_of(area.k), np.arange(0, area.k, 2)
        warp, chunk = pair // 32 // chunks, pair // 32 % chunks
        before = chunk // CHAIN * CHAIN
        place = before * WARPS + warp * np.minimum(CHAIN, chunks - before) + chunk - before
        at = self._area(name, node) + 8 * _square_stride(area.squares) + node % 8 * 16
        words = np.ascontiguousarray(copy[at + place * CHUNK_WORDS + pair % 32 // 2])
        return (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32)

    def _node_tile(self, node: np.ndarray) -> np.ndarray:
        return node // 8 * self.tile_words

    def _area(self, name: str, node: np.ndarray) -> np.ndarray:
        return self._node_tile(node) + 8 * self.node_words + self.area_starts[name]


def _on_lines(words: int) -> int:
    return -(-words // 32) * 32


def _square_stride(squares: int) -> int:
    return _on_lines(squares) + 16 if squares else 0


def _places(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Where each begins that lie one behind the other, and where the last one ends."""
    starts, at = {}, 0
    for name, size in sizes.items():
        starts[name] = at
        at += size
    return starts, at
