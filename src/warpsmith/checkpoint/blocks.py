"""Weight storage formats: how many bytes a block of weights takes, and how those bytes become float32.

Every formula is evaluated in float32 in the order llama.cpp uses, so results agree to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class BlockType:
    """A storage format: `elems` consecutive weights of a row take `bytes` bytes."""

    name: str
    ggml_id: int
    elems: int
    bytes: int

    def row_bytes(self, n: int) -> int:
        """Bytes that a row of `n` weights takes."""
        if n % self.elems:
            raise ValueError(f"a row of {n} weights is not a whole number of {self.name} blocks ({self.elems})")
        return n // self.elems * self.bytes


TYPES: dict[str, BlockType] = {
    block_type.name: block_type
    for block_type in (
        BlockType("F32", 0, 1, 4),
        BlockType("F16", 1, 1, 2),
        BlockType("BF16", 30, 1, 2),
        BlockType("Q4_0", 2, 32, 18),
        BlockType("Q4_1", 3, 32, 20),
        BlockType("Q5_0", 6, 32, 22),
        BlockType("Q5_1", 7, 32, 24),
        BlockType("Q8_0", 8, 32, 34),
        BlockType("Q4_K", 12, 256, 144),
        BlockType("Q5_K", 13, 256, 176),
        BlockType("Q6_K", 14, 256, 210),
        BlockType("IQ4_NL", 20, 32, 18),
        BlockType("IQ4_XS", 23, 256, 136),
    )
}
BY_ID: dict[int, BlockType] = {block_type.ggml_id: block_type for block_type in TYPES.values()}

# What one block looks like in a file. `d` scales, `m` / `dmin` offset, `sc` are sub-block scales, `q*` the weights.
LAYOUTS: dict[str, np.dtype] = {
    "F32": np.dtype([("x", "<f4")]),
    "F16": np.dtype([("x", "<f2")]),
    "BF16": np.dtype([("x", "<u2")]),
    "Q4_0": np.dtype([("d", "<f2"), ("qs", "u1", 16)]),
    "Q4_1": np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)]),
    "Q5_0": np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)]),
    "Q5_1": np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)]),
    "Q8_0": np.dtype([("d", "<f2"), ("qs", "i1", 32)]),
    "Q4_K": np.dtype([("d", "<f2"), ("dmin", "<f2"), ("sc", "u1", 12), ("qs", "u1", 128)]),
    "Q5_K": np.dtype([("d", "<f2"), ("dmin", "<f2"), ("sc", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)]),
    "Q6_K": np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("sc", "i1", 16), ("d", "<f2")]),
    "IQ4_NL": np.dtype([("d", "<f2"), ("qs", "u1", 16)]),
    "IQ4_XS": np.dtype([("d", "<f2"), ("sc_h", "<u2"), ("sc_l", "u1", 4), ("qs", "u1", 128)]),
}

# The sixteen levels of the IQ4 formats.
IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)

# Weights handled at a time: the temporaries of one chunk stay in a core's cache, whatever the tensor's size.
_CHUNK = 1 << 16


def dequantize(block_type: BlockType, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Weights of `raw` [..., row bytes] as a new float32 array [..., n]."""
    if raw.dtype != np.uint8 or raw.ndim == 0 or raw.shape[-1] % block_type.bytes:
        raise ValueError(f"{raw.dtype} {raw.shape} is not rows of whole {block_type.name} blocks as bytes")
    blocks = np.ascontiguousarray(raw).reshape(-1).view(LAYOUTS[block_type.name])
    out = np.empty((blocks.size, block_type.elems), dtype=np.float32)
    decode = _DECODERS[block_type.name]
    step = _CHUNK // block_type.elems
    # Infinite and NaN scales are legal bytes: they must come out as inf and NaN, not as warnings.
    with np.errstate(all="ignore"):
        for start in range(0, blocks.size, step):
            decode(blocks[start : start + step], out[start : start + step])
    return out.reshape(*raw.shape[:-1], raw.shape[-1] // block_type.bytes * block_type.elems)


def unpack_k_scales(packed: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The eight 6-bit scales and eight 6-bit mins that Q4_K and Q5_K pack in 12 bytes: [nb, 12] -> 2 x [nb, 8].

    Bytes 0-3 and 4-7 hold scales and mins of sub-blocks 0-3 in their low 6 bits; their top 2 bits complete
    the nibbles of bytes 8-11, which hold scales (low) and mins (high) of sub-blocks 4-7.
    """
    first, second, nibbles = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (nibbles & 15) | (first >> 6 << 4)], axis=1)
    mins = np.concatenate([second & 63, (nibbles >> 4) | (second >> 6 << 4)], axis=1)
    return scales, mins


def _f32(halves: NDArray[np.float16]) -> NDArray[np.float32]:
    """Per-block scales, ready to broadcast over a block's weights."""
    return halves.astype(np.float32)[:, None]


def _plain(blocks: np.ndarray, out: NDArray[np.float32]) -> None:
    out[:, 0] = blocks["x"]


def _bf16(blocks: np.ndarray, out: NDArray[np.float32]) -> None:
    bits = out.view(np.uint32)
    bits[:, 0] = blocks["x"]
    bits <<= 16


def _nibbles(blocks: np.ndarray) -> NDArray[np.uint8]:
    """Unpack 16 bytes: the low nibbles are weights 0-15, the high nibbles weights 16-31."""
    return np.concatenate([blocks["qs"] & 15, blocks["qs"] >> 4], axis=1)


def _five_bits(blocks: np.ndarray) -> NDArray[np.uint8]:
    high = np.unpackbits(np.ascontiguousarray(blocks["qh"]), axis=1, bitorder="little")
    return _nibbles(blocks) | high << np.uint8(4)


def _q8_0(blocks: np.ndarray, out: NDArray[np.float32]) -> None:
    out[...] = blocks["qs"]
    out *= _f32(blocks["d"])


def _q4_0(blocks: np.ndarray, out: NDArray[np.float32]) -> None:
    out[...] = _nibbles(blocks)
    out -= 8
    out *= _f32(blocks["d"])


def _q4_1(blocks: np.ndarray, out: NDArray[np.float32]) -> None:
    out[...] = _nibbles(blocks)
    out *= _f32(blocks["d"])
    out += _f32(blocks["m"])


def _q5_0(blocks: np.ndarray, out: NDArray[np.float32]) -> None:
    out[...] = _five_bits(blocks)
    out -= 16
    out *= _f32(blocks["d"])


def _q5_1(blocks: np.ndarray, out: NDArray[np.float32]) -> None:
    out[...] = _five_bits(blocks)
    out *= _f32(blocks["d"])
    out += _f32(blocks["m"])


def _scale_and_offset(blocks: np.ndarray, out: NDArray[np.float32]) -> None:
    """Quantised values in `out` -> weights, with the sub-block scales and mins of Q4_K and Q5_K."""
    scales, mins = unpack_k_scales(blocks["sc"])
    sub_blocks = out.reshape(-1, 8, 32)
    sub_blocks *= (_f32(blocks["d"]) * scales)[:, :, None]
    sub_blocks -= (_f32(blocks["dmin"]) * mins)[:, :, None]


def _q4_k(blocks: np.ndarray, out: NDArray[np.float32]) -> None:
    pairs = out.reshape(-1, 4, 2, 32)
    qs = blocks["qs"].reshape(-1, 4, 32)
    pairs[:, :, 0] = qs & 15
    pairs[:, :, 1] = qs >> 4
    _scale_and_offset(blocks, out)


def _q5_k(blocks: np.ndarray, out: NDArray[np.float32]) -> None:
    sub_blocks = out.reshape(-1, 8, 32)
    qs = blocks["qs"].reshape(-1, 4, 32)
    for s in range(8):  # bit s of qh is the fifth bit of sub-block s
        low = qs[:, s // 2] >> 4 if s % 2 else qs[:, s // 2] & 15
        sub_blocks[:, s] = low | (blocks["qh"] >> s & 1) << 4
    _scale_and_offset(blocks, out)


def _q6_k(blocks: np.ndarray, out: NDArray[np.float32]) -> None:
    quarters = out.reshape(-1, 2, 4, 32)  # each half of a block in four runs of 32
    ql = blocks["ql"].reshape(-1, 2, 2, 32)
    qh = blocks["qh"].reshape(-1, 2, 32)
    for r in range(4):
        low = ql[:, :, r % 2] >> 4 if r >= 2 else ql[:, :, r % 2] & 15
        quarters[:, :, r] = low | (qh >> 2 * r & 3) << 4
    out -= 32
    sub_blocks = out.reshape(-1, 16, 16)
    sub_blocks *= (_f32(blocks["d"]) * blocks["sc"])[:, :, None]


def _iq4_nl(blocks: np.ndarray, out: NDArray[np.float32]) -> None:
    np.multiply(IQ4_LEVELS[_nibbles(blocks)], _f32(blocks["d"]), out=out)


def _iq4_xs(blocks: np.ndarray, out: NDArray[np.float32]) -> None:
    sub_blocks = out.reshape(-1, 8, 32)
    qs = blocks["qs"].reshape(-1, 8, 16)
    sub_blocks[:, :, :16] = IQ4_LEVELS[qs & 15]
    sub_blocks[:, :, 16:] = IQ4_LEVELS[qs >> 4]
    s = np.arange(8)
    low = blocks["sc_l"][:, s // 2] >> (4 * (s % 2)) & 15
    high = blocks["sc_h"][:, None] >> 2 * s & 3
    scales = (low | high << 4) - 32
    sub_blocks *= (_f32(blocks["d"]) * scales.astype(np.float32))[:, :, None]


_DECODERS: dict[str, Callable[[np.ndarray, NDArray[np.float32]], None]] = {
    "F32": _plain,
    "F16": _plain,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
