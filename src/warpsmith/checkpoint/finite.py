"""Weights that are not numbers: one infinity or NaN makes every answer of a model the same nonsense, so it is refused.

Blocks hold whole numbers and a few floats; finite floats give finite weights. So of quantised tensors only the scales
are looked at, and of float tensors every weight, as integers: as signed ones everything from +infinity up is a positive
number that is not finite, as unsigned ones everything from -infinity up is a negative one.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from warpsmith.checkpoint.blocks import LAYOUTS, BlockType, dequantize
from warpsmith.errors import BadFile

_PIECE = 1 << 22  # bytes looked at in one go
_INFINITY = {"F32": 0x7F800000, "BF16": 0x7F80}  # as an integer; everything else is in half precision
_HALF_INFINITY = 0x7C00


def finite(path: Path, name: str, block_type: BlockType, read: Callable[[], np.ndarray]) -> Callable[[], np.ndarray]:
    """`read`, the stored bytes of a tensor, but an error where they hold an infinity or a NaN."""

    def read_finite() -> np.ndarray:
        raw = read()
        if not is_finite(block_type, raw):
            raise BadFile(
                f"{path}: tensor {name} holds an infinity or a NaN.",
                "Download the model again, or convert it again from the original.",
            )
        return raw

    return read_finite


def is_finite(block_type: BlockType, raw: np.ndarray) -> bool:
    """Whether all weights of these stored bytes are finite numbers."""
    layout = LAYOUTS[block_type.name]
    blocks = raw.reshape(-1).view(layout)
    floats = ["x"] if block_type.name in _INFINITY else [n for n in layout.names or () if layout[n] == np.float16]
    infinity = _INFINITY.get(block_type.name, _HALF_INFINITY)
    step = _PIECE // block_type.bytes

    def fine(start: int) -> bool:
        piece = blocks[start : start + step]
        if not floats:  # a scale in some form of its own
            return bool(np.isfinite(dequantize(block_type, piece.view(np.uint8))).all())
        return all(_below(piece[field], infinity) for field in floats)

    starts = range(0, len(blocks), step)
    if len(starts) == 1:
        return fine(0)
    with ThreadPoolExecutor(min(8, len(starts))) as threads:  # numpy lets go of the GIL
        return all(threads.map(fine, starts))


def _below(values: np.ndarray, infinity: int) -> bool:
    width = values.dtype.itemsize
    sign = 1 << (8 * width - 1)
    return bool(values.view(f"<i{width}").max() < infinity and values.view(f"<u{width}").max() < sign + infinity)
