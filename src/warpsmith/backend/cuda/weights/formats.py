"""How the kernels hold weights: a class for each format, and a header of the same name in `kernels/formats`.

A format says which types of a file it takes, how many bytes a row tile of it takes, and what its blocks look like
before the device packs them. It knows nothing of stages. To add one, write its class here and its header: nothing else
names a format.

Row tiles are cut into chunks of 256 k, 32 k for each warp. Where a format's blocks are no longer than that,
`tile_bytes` is as below; one with larger blocks has its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from warpsmith.backend.cuda.shape import WARPS, WIDE, chunks_of
from warpsmith.checkpoint.blocks import LAYOUTS, TYPES, BlockType, dequantize
from warpsmith.checkpoint.levels import IQ4_LEVELS
from warpsmith.checkpoint.quantize import quantize

Convert = Callable[[NDArray[np.uint8]], NDArray[np.uint8]]


class Format(ABC):
    """One format. Its type's number in a file is its number in the kernels."""

    type: ClassVar[BlockType]  # of the blocks that are handed to the device
    struct: ClassVar[str]  # in the header

    @property
    def header(self) -> str:
        return f"formats/{self.type.name.lower()}.cuh"

    @property
    def quantised(self) -> bool:
        """Whether weights share scales."""
        return self.type.elems > 1

    @property
    @abstractmethod
    def exact(self) -> Mapping[str, Convert]:
        """Types of a file whose values it holds exactly, and how their rows become rows of its own blocks."""

    @property
    @abstractmethod
    def slot_bytes(self) -> int:
        """What a slot of the ring holds: whole chunks of a row tile."""

    def tile_bytes(self, rows: int, k: int) -> int:
        """Bytes of a row tile in the stream."""
        return chunks_of(k) * WARPS * rows * self.type.row_bytes(32)

    def table_bytes(self, rows: int, k: int) -> int:
        """Bytes of rows that are looked up one by one: the blocks as they are."""
        return rows * self.type.row_bytes(k)

    def convert(self, stored: BlockType, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Rows of a file as rows of this format's blocks, rounded where it does not hold their values."""
        if stored.name in self.exact:
            return self.exact[stored.name](rows)
        return quantize(self.type, dequantize(stored, rows))


def _as_is(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return rows


class Bf16(Format):
    """Two bytes a weight. Takes whatever no other format takes, rounded."""

    type, struct = TYPES["BF16"], "Bf16"
    exact: ClassVar = {"BF16": _as_is}
    slot_bytes = 2 * WARPS * WIDE * 64


class Q8_0(Format):
    """Blocks of 32 bytes and a scale. Q5_0 and IQ4_NL are such blocks too, with the same scale and small integers."""

    type, struct = TYPES["Q8_0"], "Q8_0"
    slot_bytes = 4 * WARPS * WIDE * 34

    @property
    def exact(self) -> Mapping[str, Convert]:
        def q5_0(blocks: np.ndarray) -> NDArray[np.int64]:
            high = np.unpackbits(blocks["qh"], axis=1, bitorder="little").astype(np.int64)
            return (_nibbles(blocks) | high << 4) - 16

        def iq4_nl(blocks: np.ndarray) -> NDArray[np.int64]:
            return IQ4_LEVELS.astype(np.int64)[_nibbles(blocks)]

        def container(name: str, integers: Callable[[np.ndarray], NDArray[np.int64]]) -> Convert:
            def convert(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
                blocks = np.ascontiguousarray(rows).reshape(-1).view(LAYOUTS[name])
                out = np.empty(blocks.size, LAYOUTS["Q8_0"])
                out["d"], out["qs"] = blocks["d"], integers(blocks)
                return out.view(np.uint8).reshape(len(rows), -1)

            return convert

        return {"Q8_0": _as_is, "Q5_0": container("Q5_0", q5_0), "IQ4_NL": container("IQ4_NL", iq4_nl)}


class Q4_0(Format):
    """Blocks of 32 half bytes and a scale."""

    type, struct = TYPES["Q4_0"], "Q4_0"
    exact: ClassVar = {"Q4_0": _as_is}
    slot_bytes = 4 * WARPS * WIDE * 18


def _nibbles(blocks: np.ndarray) -> NDArray[np.int64]:
    """16 bytes: the low halves are weights 0 to 15, the high ones 16 to 31."""
    return np.concatenate([blocks["qs"] & 15, blocks["qs"] >> 4], axis=1).astype(np.int64)


FORMATS: tuple[Format, ...] = tuple(kind() for kind in Format.__subclasses__())


def format_for(stored: Iterable[str | None]) -> Format:
    """What rows that share row tiles are held as: a format that has their type's values exactly, else BF16; BF16 too
    where their type is not said."""
    (one, *others) = set(stored)
    fitting = [f for f in FORMATS if one in f.exact] if not others else []
    return fitting[0] if fitting else next(f for f in FORMATS if isinstance(f, Bf16))
