"""Float32 weights into block formats, and which format a recipe such as Q4_K_M gives each tensor.

The simple formats are those of llama.cpp to the bit. The K formats leave the encoder free to choose its scales;
ours minimises the squared error of each sub-block.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from warpsmith.checkpoint.blocks import LAYOUTS, TYPES, BlockType

# Weights handled at a time, so that temporaries stay in cache.
_CHUNK = 1 << 16

Floats = NDArray[np.float32]


def quantize(block_type: BlockType, x: Floats) -> NDArray[np.uint8]:
    """Rows of weights [..., n] as stored bytes [..., row bytes]."""
    name = block_type.name
    if name not in _ENCODERS:
        raise ValueError(f"{name} is read, not written; written are {', '.join(_ENCODERS)}")
    if x.dtype != np.float32 or x.ndim == 0:
        raise ValueError(f"{x.dtype} {x.shape} is not rows of float32 weights")
    row_bytes = block_type.row_bytes(x.shape[-1])
    values = np.ascontiguousarray(x).reshape(-1, block_type.elems)
    blocks = np.zeros(len(values), LAYOUTS[name])
    scale_fields = {"d", "m", "dmin"} & set(blocks.dtype.names or ())
    step = _CHUNK // block_type.elems
    with np.errstate(all="ignore"):
        for start in range(0, len(values), step):
            chunk, out = values[start : start + step], blocks[start : start + step]
            if scale_fields and not np.isfinite(chunk).all():
                raise ValueError(f"weights that are infinite or NaN cannot be stored as {name}")
            _ENCODERS[name](chunk, out)
            if not all(np.isfinite(out[field]).all() for field in scale_fields):
                raise ValueError(f"weights as large as {np.abs(chunk).max():.3g} cannot be stored as {name}")
    return blocks.view(np.uint8).reshape(*x.shape[:-1], row_bytes)


def _f32(x: Floats, out: np.ndarray) -> None:
    out["x"] = x[:, 0]


def _f16(x: Floats, out: np.ndarray) -> None:
    out["x"] = x[:, 0]
    if np.isinf(out["x"]).sum() != np.isinf(x).sum():
        raise ValueError(f"weights as large as {np.abs(x[np.isfinite(x)]).max():.3g} cannot be stored as F16")


def _bf16(x: Floats, out: np.ndarray) -> None:
    bits = x[:, 0].view(np.uint32)
    high = bits >> 16
    rounded = (bits + (np.uint32(0x7FFF) + (high & 1))) >> 16
    # Rounding could carry a NaN's payload into the exponent: keep it a NaN, and make it a quiet one.
    out["x"] = np.where(np.isnan(x[:, 0]), high | 0x40, rounded)


def _inverse(d: Floats) -> Floats:
    """1 / d, and 0 where there is none: a block of zeros, or one too small to tell from zeros."""
    inverse = 1 / d
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _peak(x: Floats, axis: int) -> Floats:
    """The value of largest magnitude, with its sign."""
    return np.take_along_axis(x, np.abs(x).argmax(axis=axis, keepdims=True), axis=axis)


def _q8_0(x: Floats, out: np.ndarray) -> None:
    d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    scaled = x * _inverse(d)
    q = np.trunc(scaled)
    q += np.trunc(2 * (scaled - q))  # halves away from zero; adding 0.5 first would round 0.49999997 up
    out["qs"] = q
    out["d"] = d[:, 0]


def _store_nibbles(q: NDArray[np.uint8], out: np.ndarray) -> None:
    out["qs"] = (q[:, :16] & 15) | q[:, 16:] << 4


def _store_five_bits(q: NDArray[np.uint8], out: np.ndarray) -> None:
    _store_nibbles(q, out)
    out["qh"] = np.packbits(q >> 4, axis=1, bitorder="little")


def _around_zero(x: Floats, out: np.ndarray, half: int) -> NDArray[np.uint8]:
    """Levels 0 .. 2 half - 1 that stand for -half .. half - 1 times d; the peak takes the level -half."""
    d = _peak(x, axis=1) / np.float32(-half)
    out["d"] = d[:, 0]
    return np.minimum(x * _inverse(d) + np.float32(half + 0.5), np.float32(2 * half - 1)).astype(np.uint8)


def _from_minimum(x: Floats, out: np.ndarray, top: int) -> NDArray[np.uint8]:
    """Levels 0 .. top from the block's minimum m to its maximum."""
    low = x.min(axis=1, keepdims=True)
    d = (x.max(axis=1, keepdims=True) - low) / np.float32(top)
    out["d"], out["m"] = d[:, 0], low[:, 0]
    return np.minimum((x - low) * _inverse(d) + np.float32(0.5), np.float32(top)).astype(np.uint8)


def _q4_0(x: Floats, out: np.ndarray) -> None:
    _store_nibbles(_around_zero(x, out, 8), out)


def _q4_1(x: Floats, out: np.ndarray) -> None:
    _store_nibbles(_from_minimum(x, out, 15), out)


def _q5_0(x: Floats, out: np.ndarray) -> None:
    _store_five_bits(_around_zero(x, out, 16), out)


def _q5_1(x: Floats, out: np.ndarray) -> None:
    _store_five_bits(_from_minimum(x, out, 31), out)


# Sub-blocks of the K formats are laid out one a column: every step below runs over long rows, and sums add in
# one order everywhere, so that a file comes out the same on every machine.
# A fit tries to spread a sub-block's range over these many levels more or fewer than there are: letting the
# extremes clip, or leaving levels unused, often places the rest better. 0 is among them, so that weights
# already on such a grid stay where they are.
_STRETCHES = [0.3 * k for k in range(-6, 5)]


def _fit_line(x: Floats, top: int) -> tuple[Floats, Floats]:
    """Per column of x: scale >= 0 and offset >= 0 such that x ~ scale * q - offset for levels q in 0 .. top."""
    n = np.float32(len(x))
    low = np.minimum(x.min(axis=0), 0)
    per_range = _inverse(x.max(axis=0) - low)
    shifted = x - low
    sum_x = x.sum(axis=0)
    scale, offset = np.zeros_like(low), -low
    least = np.full_like(low, np.inf)
    q, products = np.empty_like(x), np.empty_like(x)
    for stretch in _STRETCHES:
        np.multiply(shifted, per_range * np.float32(top + stretch), out=q)
        np.minimum(np.rint(q, out=q), np.float32(top), out=q)
        # Least squares for these levels; where it wants an offset of the wrong sign, a line through zero.
        sum_q = q.sum(axis=0)
        sum_xq = np.multiply(x, q, out=products).sum(axis=0)
        sum_qq = np.multiply(q, q, out=products).sum(axis=0)
        slope = (n * sum_xq - sum_x * sum_q) * _inverse(n * sum_qq - sum_q * sum_q)
        down = (slope * sum_q - sum_x) / n
        through_zero = down < 0
        slope = np.where(through_zero, sum_xq * _inverse(sum_qq), slope)
        down = np.where(through_zero, np.float32(0), down)
        # The squared error, less the constant sum of x^2.
        error = slope * (slope * sum_qq - 2 * sum_xq - 2 * down * sum_q) + down * (n * down + 2 * sum_x)
        better = (error < least) & (slope > 0)
        scale, offset = np.where(better, slope, scale), np.where(better, down, offset)
        least = np.where(better, error, least)
    return scale, offset


def _lines(
    x: Floats, out: np.ndarray, width: int, top: int, most: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]:
    """Levels 0 .. top of sub-blocks of `width`, and their scales and mins, 0 .. most. Stores d and dmin."""
    columns = np.ascontiguousarray(x.reshape(-1, width).T)
    scale, offset = _fit_line(columns, top)
    rounded = []
    for field, wanted in (("d", scale.reshape(-1, 256 // width)), ("dmin", offset.reshape(-1, 256 // width))):
        out[field] = wanted.max(axis=1) / np.float32(most)
        unit = out[field].astype(np.float32)[:, None]
        rounded.append((unit, np.minimum(np.rint(wanted * _inverse(unit)), np.float32(most))))
    (d, scales), (dmin, mins) = rounded
    columns += (dmin * mins).reshape(-1)
    columns *= _inverse((d * scales).reshape(-1))
    np.clip(np.rint(columns, out=columns), 0, top, out=columns)
    levels = np.ascontiguousarray(columns.astype(np.uint8).T).reshape(-1, 256)
    return levels, scales.astype(np.uint8), mins.astype(np.uint8)


def pack_two_bits(levels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The reverse of `blocks.two_bits`, of the low two bits: [nb, 256] -> [nb, 64]."""
    runs = (levels & 3).reshape(-1, 2, 4, 32)
    return np.bitwise_or.reduce(runs << np.arange(0, 8, 2, dtype=np.uint8)[:, None], axis=2).reshape(-1, 64)


def _q2_k(x: Floats, out: np.ndarray) -> None:
    levels, scales, mins = _lines(x, out, 16, 3, 15)
    out["sc"] = scales | mins << 4
    out["qs"] = pack_two_bits(levels)


def pack_k_scales(scales: NDArray[np.uint8], mins: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The reverse of `blocks.unpack_k_scales`: 2 x [nb, 8] of 6 bits -> [nb, 12]."""
    return np.concatenate(
        [
            scales[:, :4] | scales[:, 4:] >> 4 << 6,
            mins[:, :4] | mins[:, 4:] >> 4 << 6,
            (scales[:, 4:] & 15) | mins[:, 4:] << 4,
        ],
        axis=1,
    )


def _q4_k(x: Floats, out: np.ndarray) -> None:
    levels, scales, mins = _lines(x, out, 32, 15, 63)
    out["sc"] = pack_k_scales(scales, mins)
    q = levels.reshape(-1, 8, 32)
    out["qs"] = (q[:, 0::2] | q[:, 1::2] << 4).reshape(-1, 128)


def _q5_k(x: Floats, out: np.ndarray) -> None:
    levels, scales, mins = _lines(x, out, 32, 31, 63)
    out["sc"] = pack_k_scales(scales, mins)
    q = levels.reshape(-1, 8, 32)
    out["qs"] = (q[:, 0::2] & 15 | q[:, 1::2] << 4).reshape(-1, 128)
    out["qh"] = np.packbits(q >> 4, axis=1, bitorder="little").reshape(-1, 32)


def _fit_scale(x: Floats, half: int) -> Floats:
    """Per column of x: the scale, of either sign, such that x ~ scale * q for levels q in -half .. half - 1."""
    per_peak = _inverse(-_peak(x, axis=0)[0])
    scale, most = np.zeros_like(per_peak), np.zeros_like(per_peak)
    q, products = np.empty_like(x), np.empty_like(x)
    for stretch in _STRETCHES:
        np.multiply(x, per_peak * np.float32(half + stretch), out=q)
        np.clip(np.rint(q, out=q), -half, half - 1, out=q)
        sum_xq = np.multiply(x, q, out=products).sum(axis=0)
        slope = sum_xq * _inverse(np.multiply(q, q, out=products).sum(axis=0))
        explained = slope * sum_xq  # how much of the sum of x^2 the best line for these levels takes away
        better = explained > most
        scale, most = np.where(better, slope, scale), np.where(better, explained, most)
    return scale


def _centred(x: Floats, out: np.ndarray, half: int, most: int) -> tuple[NDArray[np.uint8], NDArray[np.int8]]:
    """Levels plus `half` [nb, 256] of sub-blocks of 16, and their scales -most .. most - 1. Stores the block scale."""
    columns = np.ascontiguousarray(x.reshape(-1, 16).T)
    scale = _fit_scale(columns, half).reshape(-1, 16)
    out["d"] = _peak(scale, axis=1)[:, 0] / np.float32(-most)
    d = out["d"].astype(np.float32)[:, None]
    scales = np.clip(np.rint(scale * _inverse(d)), -most, most - 1)
    columns *= _inverse((d * scales).reshape(-1))
    np.clip(np.rint(columns, out=columns), -half, half - 1, out=columns)
    columns += half
    return np.ascontiguousarray(columns.astype(np.uint8).T).reshape(-1, 256), scales.astype(np.int8)


def _q3_k(x: Floats, out: np.ndarray) -> None:
    levels, scales = _centred(x, out, 4, 32)
    six = (scales + 32).view(np.uint8)
    out["sc"][:, :8] = (six[:, :8] & 15) | six[:, 8:] << 4
    pairs = (six >> 4).reshape(-1, 4, 4)
    out["sc"][:, 8:] = pairs[:, 0] | pairs[:, 1] << 2 | pairs[:, 2] << 4 | pairs[:, 3] << 6
    out["qs"] = pack_two_bits(levels)
    out["qh"] = np.packbits((levels >> 2).reshape(-1, 8, 32), axis=1, bitorder="little").reshape(-1, 32)


def _q6_k(x: Floats, out: np.ndarray) -> None:
    levels, out["sc"] = _centred(x, out, 32, 128)
    q = levels.reshape(-1, 2, 4, 32)
    out["ql"] = (q[:, :, 0:2] & 15 | q[:, :, 2:4] << 4).reshape(-1, 128)
    out["qh"] = pack_two_bits(levels >> np.uint8(4))


_ENCODERS: dict[str, Callable[[Floats, np.ndarray], None]] = {
    "F32": _f32,
    "F16": _f16,
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
}


# What a recipe stores most matrices as; what it stores those as that matter more, in the layers where they do;
# and the output matrix.
_RECIPES = {
    "f32": ("F32", "F32", "F32"),
    "f16": ("F16", "F16", "F16"),
    "bf16": ("BF16", "BF16", "BF16"),
    "q8_0": ("Q8_0", "Q8_0", "Q8_0"),
    "q4_0": ("Q4_0", "Q4_0", "Q6_K"),
    "q4_k_m": ("Q4_K", "Q6_K", "Q6_K"),
    "q5_k_m": ("Q5_K", "Q6_K", "Q6_K"),
    "q6_k": ("Q6_K", "Q6_K", "Q6_K"),
}
RECIPES = tuple(_RECIPES)
_MORE_BITS = ("attn_v.weight", "attn_qkv.weight", "ffn_down.weight")
# Where rows do not divide into blocks of 256, the next larger format with blocks of 32.
_SHORT_ROWS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def recipe_type(recipe: str, name: str, layer: int | None, n_layers: int, tied: bool, shape: tuple[int, ...]) -> str:
    """The type that llama.cpp's recipe of that name gives a tensor.

    `layer` is the tensor's layer, None outside the layers; `n_layers` counts a multi-token-prediction layer too;
    `tied` says that the model has no output matrix of its own; `shape` is row-major.
    """
    if recipe not in _RECIPES:
        raise ValueError(f"no recipe {recipe!r}; there are {', '.join(RECIPES)}")
    if len(shape) < 2 or not name.endswith(".weight") or name.endswith(("_norm.weight", "ssm_conv1d.weight")):
        return "F32"
    chosen, better, output = _RECIPES[recipe]
    if name == "output.weight" or (tied and name == "token_embd.weight"):
        chosen = output
    elif layer is not None and name.endswith(_MORE_BITS) and _deserves_more_bits(layer, n_layers):
        chosen = better
    if shape[-1] % TYPES[chosen].elems:
        chosen = _SHORT_ROWS.get(chosen, "F16")
    return "F16" if shape[-1] % TYPES[chosen].elems else chosen


def _deserves_more_bits(layer: int, n_layers: int) -> bool:
    """The first and last eighth of the layers, and every third between."""
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2
