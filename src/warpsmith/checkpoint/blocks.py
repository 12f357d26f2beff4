"""Weight storage formats: how many bytes a block of weights takes, and how those bytes become float32.

Every formula is evaluated in float32 in the order llama.cpp uses, so results agree to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from warpsmith.checkpoint.levels import IQ4_LEVELS, UNITS, decode_levels


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
        BlockType("Q2_K", 10, 256, 84),
        BlockType("Q3_K", 11, 256, 110),
        BlockType("Q4_K", 12, 256, 144),
        BlockType("Q5_K", 13, 256, 176),
        BlockType("Q6_K", 14, 256, 210),
        BlockType("IQ4_NL", 20, 32, 18),
        BlockType("IQ4_XS", 23, 256, 136),
        BlockType("IQ1_S", 19, 256, 50),
        BlockType("IQ1_M", 29, 256, 56),
        BlockType("IQ2_XXS", 16, 256, 66),
        BlockType("IQ2_XS", 17, 256, 74),
        BlockType("IQ2_S", 22, 256, 82),
        BlockType("IQ3_XXS", 18, 256, 98),
        BlockType("IQ3_S", 21, 256, 110),
        BlockType("TQ1_0", 34, 256, 54),
        BlockType("TQ2_0", 35, 256, 66),
        BlockType("MXFP4", 39, 32, 17),
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
    "Q2_K": np.dtype([("sc", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")]),
    "Q3_K": np.dtype([("qh", "u1", 32), ("qs", "u1", 64), ("sc", "u1", 12), ("d", "<f2")]),
    "Q4_K": np.dtype([("d", "<f2"), ("dmin", "<f2"), ("sc", "u1", 12), ("qs", "u1", 128)]),
    "Q5_K": np.dtype([("d", "<f2"), ("dmin", "<f2"), ("sc", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)]),
    "Q6_K": np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("sc", "i1", 16), ("d", "<f2")]),
    "IQ4_NL": np.dtype([("d", "<f2"), ("qs", "u1", 16)]),
    "IQ4_XS": np.dtype([("d", "<f2"), ("sc_h", "<u2"), ("sc_l", "u1", 4), ("qs", "u1", 128)]),
    "IQ1_S": np.dtype([("d", "<f2"), ("qs", "u1", 32), ("qh", "<u2", 8)]),
    "IQ1_M": np.dtype([("qs", "u1", 32), ("qh", "u1", 16), ("sc", "<u2", 4)]),
    "IQ2_XXS": np.dtype([("d", "<f2"), ("qs", "<u4", (8, 2))]),
    "IQ2_XS": np.dtype([("d", "<f2"), ("qs", "<u2", 32), ("sc", "u1", 8)]),
    "IQ2_S": np.dtype([("d", "<f2"), ("qs", "u1", 32), ("signs", "u1", 32), ("qh", "u1", 8), ("sc", "u1", 8)]),
    "IQ3_XXS": np.dtype([("d", "<f2"), ("qs", "u1", 64), ("sc", "<u4", 8)]),
    "IQ3_S": np.dtype([("d", "<f2"), ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("sc", "u1", 4)]),
    "TQ1_0": np.dtype([("qs", "u1", 48), ("qh", "u1", 4), ("d", "<f2")]),
    "TQ2_0": np.dtype([("qs", "u1", 64), ("d", "<f2")]),
    "MXFP4": np.dtype([("e", "u1"), ("qs", "u1", 16)]),
}

# MXFP4's levels, in halves: a sign, two bits of exponent, one of mantissa.
MXFP4_LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8)

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


def two_bits(qs: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[nb, 64] -> [nb, 256]: each half of a block is 32 bytes, whose pairs of bits are four runs of 32 weights."""
    halves = qs.reshape(-1, 2, 1, 32)
    return (halves >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & np.uint8(3)).reshape(-1, 256)


def unpack_q3_scales(packed: NDArray[np.uint8]) -> NDArray[np.int8]:
    """The sixteen 6-bit scales that Q3_K packs in 12 bytes, less 32: nibbles, then what completes them by pairs."""
    nibbles = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    pairs = (packed[:, None, 8:12] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3).reshape(-1, 16)
    return (nibbles | pairs << 4).view(np.int8) - np.int8(32)


def _q2_k(blocks: np.ndarray, out: NDArray[np.float32]) -> None:
    out[...] = two_bits(blocks["qs"])
    sub_blocks = out.reshape(-1, 16, 16)
    sub_blocks *= (_f32(blocks["d"]) * (blocks["sc"] & 15))[:, :, None]
    sub_blocks -= (_f32(blocks["dmin"]) * (blocks["sc"] >> 4))[:, :, None]


def _q3_k(blocks: np.ndarray, out: NDArray[np.float32]) -> None:
    third = (blocks["qh"][:, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(-1, 256)
    out[...] = two_bits(blocks["qs"]) | third << 2
    out -= 4
    sub_blocks = out.reshape(-1, 16, 16)
    sub_blocks *= (_f32(blocks["d"]) * unpack_q3_scales(blocks["sc"]))[:, :, None]


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


def ternary(blocks: np.ndarray) -> NDArray[np.uint8]:
    """TQ1_0's weights plus one. A byte is a fraction of 256 whose digits in base 3 are five weights, or four."""
    powers = np.array([1, 3, 9, 27, 81], dtype=np.uint8)[:, None]
    runs = []
    for packed, digits in ((blocks["qs"][:, :32], 5), (blocks["qs"][:, 32:], 5), (blocks["qh"], 4)):
        remainder = packed[:, None] * powers[:digits]  # modulo 256: the digits before are gone
        runs.append((remainder.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(blocks), -1))
    return np.concatenate(runs, axis=1)


def _tq1_0(blocks: np.ndarray, out: NDArray[np.float32]) -> None:
    out[...] = ternary(blocks)
    out -= 1
    out *= _f32(blocks["d"])


def _tq2_0(blocks: np.ndarray, out: NDArray[np.float32]) -> None:
    out[...] = two_bits(blocks["qs"])
    out -= 1
    out *= _f32(blocks["d"])


def _mxfp4(blocks: np.ndarray, out: NDArray[np.float32]) -> None:
    half_scales = np.ldexp(np.float32(1), blocks["e"].astype(np.int32) - 128)
    np.multiply(MXFP4_LEVELS[_nibbles(blocks)], half_scales[:, None], out=out)


_DECODERS: dict[str, Callable[[np.ndarray, NDArray[np.float32]], None]] = {
    "F32": _plain,
    "F16": _plain,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "MXFP4": _mxfp4,
    **{name: partial(decode_levels, name) for name in UNITS},
}
