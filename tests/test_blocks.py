"""Block formats against the `gguf` package, bit for bit."""

from __future__ import annotations

import tracemalloc

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warpsmith.checkpoint.blocks import BY_ID, LAYOUTS, TYPES, BlockType, dequantize

ALL = list(TYPES.values())
each_type = pytest.mark.parametrize("block_type", ALL, ids=lambda t: t.name)

# Halves that trip formulas: zeros, subnormals, the largest finite ones, infinities, NaNs.
SPECIAL_HALVES = [
    0x0000,
    0x8000,
    0x0001,
    0x83FF,
    0x0400,
    0x3C00,
    0xBC00,
    0x7BFF,
    0xFBFF,
    0x7C00,
    0xFC00,
    0x7E00,
]


def oracle(block_type: BlockType, raw: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(block_type.ggml_id))


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Equal to the bit; a NaN equals any NaN, since no format says which NaN comes out."""
    assert ours.dtype == theirs.dtype == np.float32
    assert ours.shape == theirs.shape
    both_nan = np.isnan(ours) & np.isnan(theirs)
    np.testing.assert_array_equal(ours.view(np.uint32)[~both_nan], theirs.view(np.uint32)[~both_nan])


def test_sizes_and_ids_are_those_of_ggml() -> None:
    for block_type in ALL:
        theirs = gguf.GGMLQuantizationType[block_type.name]
        assert block_type.ggml_id == theirs.value
        assert (block_type.elems, block_type.bytes) == gguf.GGML_QUANT_SIZES[theirs]
        assert LAYOUTS[block_type.name].itemsize == block_type.bytes
        assert BY_ID[theirs.value] is block_type


@each_type
def test_random_bytes_decode_as_in_gguf(block_type: BlockType) -> None:
    rng = np.random.default_rng(block_type.ggml_id)
    raw = rng.integers(0, 256, size=(3, 500, 3 * block_type.bytes), dtype=np.uint8)
    assert_same_bits(dequantize(block_type, raw), oracle(block_type, raw))


@each_type
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_bytes_decode_as_in_gguf(block_type: BlockType, data: st.DataObject) -> None:
    block = st.binary(min_size=block_type.bytes, max_size=block_type.bytes)
    blocks = data.draw(st.lists(block, min_size=1, max_size=3))
    raw = np.frombuffer(b"".join(blocks), np.uint8).reshape(len(blocks), -1)
    assert_same_bits(dequantize(block_type, raw), oracle(block_type, raw))


@each_type
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_extreme_blocks_decode_as_in_gguf(block_type: BlockType, data: st.DataObject) -> None:
    fill = data.draw(st.sampled_from([0x00, 0xFF, 0x80, 0x7F]) | st.integers(0, 255))
    raw = np.full((2, block_type.bytes), fill, dtype=np.uint8)
    blocks = raw.view(LAYOUTS[block_type.name])
    if block_type.name == "MXFP4":  # its scale is an exponent: the smallest, the largest, the one for NaN
        blocks["e"][:, 0] = data.draw(st.lists(st.sampled_from([0, 1, 2, 127, 254, 255]), min_size=2, max_size=2))
    for field in ("d", "dmin", "m"):
        if field in (blocks.dtype.names or ()):
            halves = data.draw(st.lists(st.sampled_from(SPECIAL_HALVES), min_size=2, max_size=2))
            blocks[field][:, 0] = np.array(halves, dtype=np.uint16).view(np.float16)
    noise = data.draw(st.lists(st.tuples(st.integers(0, block_type.bytes - 1), st.integers(0, 255)), max_size=8))
    for position, value in noise:
        raw[0, position] = value
    assert_same_bits(dequantize(block_type, raw), oracle(block_type, raw))


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_every_16_bit_pattern(name: str) -> None:
    raw = np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(4, -1)
    assert_same_bits(dequantize(TYPES[name], raw), oracle(TYPES[name], raw))


@each_type
def test_shapes_strides_and_ownership(block_type: BlockType) -> None:
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, size=(4, 6, 2 * block_type.bytes), dtype=np.uint8)
    raw.setflags(write=False)
    whole = dequantize(block_type, raw)
    assert whole.shape == (4, 6, 2 * block_type.elems)
    assert whole.flags.writeable
    assert_same_bits(dequantize(block_type, raw[::2, 1::3]), np.ascontiguousarray(whole[::2, 1::3]))
    assert_same_bits(dequantize(block_type, raw[1, 2]), whole[1, 2].copy())
    assert dequantize(block_type, raw[:0]).shape == (0, 6, 2 * block_type.elems)
    # an odd address, as any byte offset of a mapped file may be
    shifted = np.empty(raw.size + 1, dtype=np.uint8)[1:]
    shifted[:] = raw.reshape(-1)
    assert_same_bits(dequantize(block_type, shifted.reshape(raw.shape)), whole)


@each_type
def test_partial_blocks_are_refused(block_type: BlockType) -> None:
    assert block_type.row_bytes(512) * block_type.elems == 512 * block_type.bytes
    if block_type.elems > 1:
        with pytest.raises(ValueError, match=block_type.name):
            block_type.row_bytes(block_type.elems + 1)
    with pytest.raises(ValueError, match=block_type.name):
        dequantize(block_type, np.zeros((2, block_type.bytes + 1), dtype=np.uint8))
    with pytest.raises(ValueError, match="float32"):
        dequantize(block_type, np.zeros((2, block_type.bytes), dtype=np.float32))  # type: ignore[arg-type]


@each_type
def test_memory_stays_near_the_result(block_type: BlockType) -> None:
    raw = np.zeros((1 << 20) // block_type.elems * block_type.bytes, dtype=np.uint8)
    tracemalloc.start()
    out = dequantize(block_type, raw)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.6 * out.nbytes
