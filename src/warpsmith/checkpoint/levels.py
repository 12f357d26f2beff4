"""Formats that name their weights: every weight is one of at most sixteen whole levels, times a whole scale that
sixteen neighbours share, times a number for the block.

    weight = d * UNITS[name] * scale * level

The three factors are short enough for every product to be exact in float32, whatever their order. So this is both how
these formats become floats and how a backend may keep them: as levels and scales, with nothing lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpsmith.checkpoint.lattices import lattice

# The levels of the IQ4 formats.
IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8)

# What the whole numbers below are multiples of, in block scales.
UNITS = {
    "IQ1_S": 1 / 8,
    "IQ1_M": 1 / 8,
    "IQ2_XXS": 1 / 8,
    "IQ2_XS": 1 / 8,
    "IQ2_S": 1 / 8,
    "IQ3_XXS": 1 / 4,
    "IQ3_S": 1.0,
    "IQ4_XS": 1.0,
}


class Levels(NamedTuple):
    d: NDArray[np.float16]  # [nb]
    scales: NDArray[np.int8]  # [nb, 16]
    levels: NDArray[np.int8]  # [nb, 256]


def alphabet(name: str) -> NDArray[np.int8]:
    """The levels that a format's weights can have, at most sixteen, in rising order."""
    if name.startswith("IQ4"):
        return IQ4_LEVELS
    if name.startswith("IQ1"):
        return np.array([-9, -7, -1, 1, 7, 9], dtype=np.int8)
    points = lattice(name)
    return np.unique([points, -points])


def levels_of(name: str, blocks: np.ndarray) -> Levels:
    """The whole numbers of stored blocks (`blocks.LAYOUTS[name]`)."""
    return _READERS[name](blocks)


def decode_levels(name: str, blocks: np.ndarray, out: NDArray[np.float32]) -> None:
    d, scales, levels = levels_of(name, blocks)
    per_scale = (d.astype(np.float32) * np.float32(UNITS[name]))[:, None] * scales
    np.multiply(levels.reshape(-1, 16, 16), per_scale[:, :, None], out=out.reshape(-1, 16, 16))


def _signed(levels: NDArray[np.int8], signs: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Levels [nb, 256] with a sign bit each, eight to a byte [nb, 32]."""
    negative = np.unpackbits(signs, axis=1, bitorder="little").view(np.int8)
    return (levels ^ -negative) + negative


def _with_parity(seven: np.ndarray) -> NDArray[np.uint8]:
    """Seven sign bits and the eighth, which makes the number of minus signs even."""
    folded = seven ^ seven >> 4
    folded ^= folded >> 2
    return ((seven | (folded ^ folded >> 1) << 7) & 0xFF).astype(np.uint8)


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[nb, n] -> [nb, 2n], a byte's low half first."""
    return np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), -1)


def _odd(numbers: np.ndarray, times: int) -> NDArray[np.int8]:
    """Scales 2 s + 1, repeated until there are sixteen."""
    return np.repeat((2 * numbers + 1).astype(np.int8), times, axis=1)


_SEVENS = 7 * np.arange(4, dtype=np.uint32)


def _packed_signs(words: np.ndarray) -> tuple[NDArray[np.uint8], NDArray[np.int8]]:
    """Words [nb, 8] of four times seven sign bits and a scale of four bits -> signs [nb, 32], scales [nb, 16]."""
    seven = (words[:, :, None] >> _SEVENS & 127).reshape(len(words), 32)
    return _with_parity(seven), _odd(words >> 28, 2)


def _iq2_xxs(blocks: np.ndarray) -> Levels:
    indices = np.ascontiguousarray(blocks["qs"][:, :, 0]).view(np.uint8)  # [nb, 32]
    signs, scales = _packed_signs(blocks["qs"][:, :, 1])
    return Levels(blocks["d"], scales, _signed(lattice("IQ2_XXS")[indices].reshape(-1, 256), signs))


def _iq2_xs(blocks: np.ndarray) -> Levels:
    indices, signs = blocks["qs"] & 511, _with_parity(blocks["qs"] >> 9)
    return Levels(
        blocks["d"], _odd(_nibbles(blocks["sc"]), 1), _signed(lattice("IQ2_XS")[indices].reshape(-1, 256), signs)
    )


def _iq2_s(blocks: np.ndarray) -> Levels:
    high = (blocks["qh"][:, :, None] >> 2 * np.arange(4) & 3).reshape(-1, 32)
    levels = lattice("IQ2_S")[blocks["qs"] | high << 8].reshape(-1, 256)
    return Levels(blocks["d"], _odd(_nibbles(blocks["sc"]), 1), _signed(levels, blocks["signs"]))


def _iq3_xxs(blocks: np.ndarray) -> Levels:
    signs, scales = _packed_signs(blocks["sc"])
    return Levels(blocks["d"], scales, _signed(lattice("IQ3_XXS")[blocks["qs"]].reshape(-1, 256), signs))


def _iq3_s(blocks: np.ndarray) -> Levels:
    high = np.unpackbits(blocks["qh"], axis=1, bitorder="little").astype(np.uint16)
    levels = lattice("IQ3_S")[blocks["qs"] | high << 8].reshape(-1, 256)
    return Levels(blocks["d"], _odd(_nibbles(blocks["sc"]), 2), _signed(levels, blocks["signs"]))


def _eighths(indices: np.ndarray, lowered: np.ndarray) -> NDArray[np.int8]:
    """The IQ1 formats shift eight weights -1, 0, 1 by an eighth up, or down where told: levels in eighths."""
    shift = np.where(lowered, np.int8(-1), np.int8(1))
    return (8 * lattice("IQ1")[indices] + shift[:, :, None]).reshape(-1, 256)


def _iq1_s(blocks: np.ndarray) -> Levels:
    word = blocks["qh"]
    high = (word[:, :, None] >> 3 * np.arange(4) & 7).reshape(-1, 32)
    levels = _eighths(blocks["qs"] | high << 8, np.repeat(word >> 15, 4, axis=1))
    return Levels(blocks["d"], _odd(word >> 12 & 7, 2), levels)


def _iq1_m(blocks: np.ndarray) -> Levels:
    word = blocks["sc"]  # four scales of three bits, and four bits of d
    bits = (word >> 12 << 4 * np.arange(4)).sum(axis=1, dtype=np.uint16)
    high = _nibbles(blocks["qh"]).astype(np.uint16)
    levels = _eighths(blocks["qs"] | (high & 7) << 8, high >> 3)
    return Levels(bits.view(np.float16), _odd((word[:, :, None] >> 3 * np.arange(4) & 7).reshape(-1, 16), 1), levels)


def _iq4_xs(blocks: np.ndarray) -> Levels:
    qs = blocks["qs"].reshape(-1, 8, 16)
    levels = IQ4_LEVELS[np.concatenate([qs & 15, qs >> 4], axis=2)].reshape(-1, 256)
    high = blocks["sc_h"][:, None] >> 2 * np.arange(8) & 3
    scales = (_nibbles(blocks["sc_l"]) | high << 4).astype(np.int8) - np.int8(32)
    return Levels(blocks["d"], np.repeat(scales, 2, axis=1), levels)


_READERS: dict[str, Callable[[np.ndarray], Levels]] = {
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ4_XS": _iq4_xs,
}
