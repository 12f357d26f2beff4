"""How rows of keys and values are kept: the host's view of kernels/common/cache.cuh.

A cache of a key head is [position, row_bytes], and so are drafted rows by node. A row holds 256 dimensions, then the
fp16 scales of its eight blocks of 32, if it has blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from warpsmith.backend.cuda.shape import HEAD_DIM

BLOCK = 32


class CacheRows(ABC):
    """One way to keep a row."""

    name: str  # as the command line spells it
    number: int  # CacheType
    row_bytes: int

    @abstractmethod
    def decode(self, rows: np.ndarray) -> np.ndarray:
        """Bytes [..., row_bytes] as the values that attention takes, float32 [..., 256]."""

    def _scaled(self, quants: np.ndarray, rows: np.ndarray) -> np.ndarray:
        scales = np.ascontiguousarray(rows[..., -HEAD_DIM // BLOCK * 2 :]).view(np.float16)
        return (quants.astype(np.float16) * np.repeat(scales, BLOCK, axis=-1)).astype(np.float32)


class F16Rows(CacheRows):
    name, number, row_bytes = "f16", 0, HEAD_DIM * 2

    def decode(self, rows: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(rows).view(np.float16).astype(np.float32)


class Q8Rows(CacheRows):
    name, number, row_bytes = "q8_0", 1, HEAD_DIM + HEAD_DIM // BLOCK * 2

    def decode(self, rows: np.ndarray) -> np.ndarray:
        return self._scaled(rows[..., :HEAD_DIM].astype(np.int16) - 128, rows)


class Q4Rows(CacheRows):
    name, number, row_bytes = "q4_0", 2, HEAD_DIM // 2 + HEAD_DIM // BLOCK * 2

    def decode(self, rows: np.ndarray) -> np.ndarray:
        words = np.ascontiguousarray(rows[..., : HEAD_DIM // 2]).view(np.uint32)
        shifts = np.array([4 * (i // 2) + 16 * (i % 2) for i in range(8)], np.uint32)
        nibbles = words[..., None] >> shifts & 15
        return self._scaled(nibbles.reshape(*rows.shape[:-1], HEAD_DIM).astype(np.int16) - 8, rows)


CACHE_ROWS: dict[str, CacheRows] = {each.name: each for each in (F16Rows(), Q8Rows(), Q4Rows())}
