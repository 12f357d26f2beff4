"""How rows of keys and values are kept on the device: the header alone, compiled for the CPU, against the formats."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator.gpu import FLAGS, _folder
from warpsmith.backend.cuda.memory.caches import CACHE_ROWS
from warpsmith.checkpoint.blocks import TYPES, dequantize
from warpsmith.checkpoint.quantize import quantize

SOURCE = """
#define __CUDA_ARCH__ 900
#include "machine.h"
#include "common/cache.cuh"
template <int TYPE>
void store(u8* rows, const float* values, int count, u32* back) {
    machine::run(true, 1, 32, 0, 1, [&] {
        const int lane = threadIdx.x;
        for (int i = 0; i < count; i++) {
            float v[8];
            for (int j = 0; j < 8; j++) v[j] = values[i * 256 + lane * 8 + j];
            u8* row = rows + i * cache_row_bytes(TYPE);
            store_eight<TYPE, 1>(row, lane, v);
            __syncwarp();
            uint4 got = *(const uint4*)(row + (TYPE == CACHE_F16 ? 16 * lane : 0));
            if (TYPE != CACHE_F16) {
                const u32 d = *(const u16*)(row + cache_scales_at(TYPE) + 2 * (lane / 4));
                const u8* at = row + (TYPE == CACHE_Q8_0 ? 8 : 4) * lane;
                got = eight_values<TYPE>({*(const u32*)at, *(const u32*)(at + 4)}, d | d << 16);
            }
            ((uint4*)back)[i * 32 + lane] = got;
        }
    });
}
EXPORTED void run(int type, u8* rows, const float* values, int count, u32* back) {
    if (type == CACHE_F16) store<CACHE_F16>(rows, values, count, back);
    if (type == CACHE_Q8_0) store<CACHE_Q8_0>(rows, values, count, back);
    if (type == CACHE_Q4_0) store<CACHE_Q4_0>(rows, values, count, back);
}
EXPORTED int row_bytes(int type) { return cache_row_bytes(type); }
"""


@cache
def library() -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    folder = _folder() / "caches"
    folder.mkdir(exist_ok=True)
    (folder / "rows.cpp").write_text(SOURCE)
    subprocess.run(["g++", *FLAGS, f"-I{_folder()}", folder / "rows.cpp", "-o", folder / "rows.so"], check=True)
    return ctypes.CDLL(str(folder / "rows.so"))


def stored(name: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of rows, and the fp16 that the kernels read back."""
    kept = CACHE_ROWS[name]
    values = np.ascontiguousarray(values, np.float32)
    back = np.zeros((len(values), 256), np.float16)
    rows = np.zeros(len(values) * kept.row_bytes + 16, np.uint8)  # a lane reads eight bytes at a time
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (rows, values, back)]
    library().run(kept.number, pointers[0], pointers[1], len(values), pointers[2])
    return rows[: len(values) * kept.row_bytes].reshape(len(values), -1), back


@pytest.mark.parametrize("name", CACHE_ROWS)
def test_host_and_kernels_agree_on_the_bytes_of_a_row(name: str) -> None:
    assert library().row_bytes(CACHE_ROWS[name].number) == CACHE_ROWS[name].row_bytes
    assert CACHE_ROWS[name].row_bytes % 16 == 0


@pytest.mark.parametrize("name", CACHE_ROWS)
@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-9, 1e-3, 1.0, 300.0]))
def test_rows_hold_what_the_format_makes_of_the_values(name: str, seed: int, size: float) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((5, 256)) * size).astype(np.float32)
    values[0] = 0
    values[1, :64] = np.round(values[1, :64] / size) * size  # equal magnitudes, both signs
    rows, back = stored(name, values)
    kind = TYPES[name.upper()]
    exact = dequantize(kind, quantize(kind, values))

    np.testing.assert_array_equal(CACHE_ROWS[name].decode(rows), back.astype(np.float32))
    np.testing.assert_array_equal(back, exact.astype(np.float16))
