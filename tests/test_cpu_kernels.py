"""The CPU engine's matrix kernels and packed layouts, type by type."""

import dataclasses
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from random_models import random_rows, random_tensors, small_config
from warpsmith.backend.cpu import _cpu
from warpsmith.backend.cpu.loading import HELD, PACKED, held, load
from warpsmith.checkpoint.blocks import LAYOUTS, TYPES, dequantize
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.errors import BadFile

# Every kind of kernels this processor can run, the best first.
HERE = _cpu.features()
SETS = [HERE, []]
if "avx512vnni" in HERE:
    SETS.insert(1, ["avx2", "fma", "f16c"])
if "i8mm" in HERE:
    SETS.insert(1, ["neon", "dotprod"])
ALL_KERNELS = pytest.mark.parametrize("kernels", [tuple(names) for names in SETS], ids=lambda names: "+".join(names))

ROUNDED = ("Q4_1", "Q5_1")
EXACT = [*PACKED, *(kind for kind in HELD if kind not in ROUNDED)]
ROWS, COLS = 161, 768  # the last panel of 16 rows holds one


def stored(kind: str) -> Tensor:
    """Random bytes of a type with sensible scales, every quantised value possible."""
    block_type = TYPES[kind]
    if kind in ("F32", "F16", "BF16"):
        values = np.random.default_rng(9).standard_normal((ROWS, COLS)).astype(np.float32)
        raw = {
            "F32": lambda: values,
            "F16": lambda: values.astype(np.float16),
            "BF16": lambda: np.ascontiguousarray(values.view(np.uint16)[:, 1::2]),
        }[kind]().view(np.uint8)
    else:
        raw = random_rows(kind, ROWS, COLS)
    return Tensor("token_embd.weight", block_type, (ROWS, COLS), lambda: raw)


@cache
def engine(kind: str, kernels: tuple[str, ...] = tuple(HERE), threads: int = 2) -> _cpu.Engine:
    """A model whose embedding is the matrix under test; the rest of it only makes it loadable."""
    config = small_config(2, hidden=COLS, vocab=ROWS)
    tensors = random_tensors(config) | {"token_embd.weight": stored(kind)}
    made = _cpu.Engine(config, threads, kernels)
    load(made, config, tensors, None)
    return made


def multiply(made: _cpu.Engine, x: np.ndarray) -> np.ndarray:
    out = np.full((len(x), -(-ROWS // 16) * 16), np.nan, np.float32)
    made.multiply("token_embd.weight", x, out)
    return out[:, :ROWS]


def quantised(x: np.ndarray, run: int) -> np.ndarray:
    """Activations after rounding to 8 bits with one scale for `run` of them."""
    blocks = x.reshape(len(x), -1, run)
    most = np.abs(blocks).max(axis=2, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.where(most > 0, np.rint(blocks * (np.float32(127) / most)), 0)
    return (q.astype(np.float64) * (most / np.float32(127))).reshape(x.shape)


@pytest.mark.parametrize("kind", EXACT)
def test_a_packed_row_unpacks_to_the_stored_weights(kind: str) -> None:
    expected, row = stored(kind).float32(), np.empty(COLS, np.float32)
    for i in range(ROWS):
        engine(kind).unpack_row(i, row)
        assert (row == expected[i]).all()


@ALL_KERNELS
@pytest.mark.parametrize("kind", EXACT)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 1 << 20), columns=st.integers(1, 64))
def test_products_are_those_of_the_rounded_activations(
    kind: str, kernels: tuple[str, ...], seed: int, columns: int
) -> None:
    """Float weights: float sums. Quantised ones: exact, but for the float operations of a block."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((columns, COLS)) * np.exp(rng.standard_normal((columns, COLS)))).astype(np.float32)
    x[0, :256] = 0
    runs = {"F32": None, "F16": None, "BF16": None, "Q8_0": 32, "Q4_0": 32}
    run = runs.get(HELD.get(kind, kind), 256)
    rounded = quantised(x, run) if run else x.astype(np.float64)
    weights = stored(kind).float32().astype(np.float64)
    found = multiply(engine(kind, kernels), x)
    scale = np.abs(rounded) @ np.abs(weights).T  # what the rounding of float sums is relative to
    assert (np.abs(found - rounded @ weights.T) <= 2e-6 * scale + 1e-30).all()


@ALL_KERNELS
@pytest.mark.parametrize("kind", EXACT)
def test_a_column_does_not_depend_on_its_neighbours(kind: str, kernels: tuple[str, ...]) -> None:
    x = np.random.default_rng(3).standard_normal((64, COLS)).astype(np.float32)
    whole = multiply(engine(kind, kernels), x)
    for columns in (1, 2, 3, 5, 31):
        for first in (0, 7, 33):
            assert (multiply(engine(kind, kernels), x[first : first + columns]) == whole[first : first + columns]).all()
    assert (multiply(engine(kind, kernels, threads=3), x) == whole).all()


@pytest.mark.parametrize("kind", ROUNDED)
def test_types_without_kernels_become_q8(kind: str) -> None:
    tensor = stored(kind)
    exact, kept = tensor.float32(), dequantize(TYPES["Q8_0"], held(tensor))
    assert np.abs(kept - exact).max() <= 5e-3 * np.abs(exact).max()


@pytest.mark.parametrize("exponent", [0, 90, 250, 255])
def test_scales_that_a_half_cannot_hold_are_refused(exponent: int) -> None:
    raw = random_rows("MXFP4", 2, 64)
    raw.view(LAYOUTS["MXFP4"])["e"][1, 1] = exponent
    with pytest.raises(BadFile, match="'w' is MXFP4 with a scale"):
        held(Tensor("w", TYPES["MXFP4"], (2, 64), lambda: raw))


def test_every_type_runs() -> None:
    assert {*PACKED, *HELD} == set(TYPES)


def test_a_conversion_is_said(caplog: pytest.LogCaptureFixture) -> None:
    config = dataclasses.replace(small_config(2), hidden=COLS, vocab=ROWS)
    load(_cpu.Engine(config, 1, []), config, random_tensors(config) | {"token_embd.weight": stored("Q4_1")}, None)
    assert "1 tensors of type Q4_1 are held as Q8_0" in caplog.text


@pytest.mark.skipif("avx2" not in HERE, reason="looks for an x86 instruction")
def test_weights_are_prefetched() -> None:
    """A compiler that takes prefetches for nothing once left them all out, and a third of the speed with them."""
    code = Path(_cpu.__file__).read_bytes()
    prefetcht1 = re.findall(rb"\x0f\x18[\x50-\x57\x90-\x97]", code)  # with an offset from a register
    assert len(prefetcht1) > 50


def test_a_matrix_of_the_wrong_size_is_refused() -> None:
    made = _cpu.Engine(small_config(2), 1, [])
    made.reserve(1 << 16)
    with pytest.raises(ValueError, match="size of its shape"):
        made.add_matrix("x", "Q8_0", 4, 64, np.zeros((4, 67), np.uint8))
    with pytest.raises(ValueError, match="no kernels"):
        made.add_matrix("x", "Q5_0", 4, 64, np.zeros((4, 44), np.uint8))
    with pytest.raises(ValueError, match="reserved"):
        made.add_matrix("x", "F32", 1 << 12, 64, np.zeros((1 << 12, 256), np.uint8))
