"""How much products of a few columns and other instructions are in each other's way on an SM.

PYTHONPATH=src python bench/lab/beside_products.py

Some groups of four warps only multiply (wgmma, weights in registers). Another one only runs one kind of instruction on
eight independent registers, until the products are done. Printed: clocks of a scheduler for a product, and for an
instruction.
"""

from __future__ import annotations

import ctypes

import numpy as np

from warpsmith.backend.cuda.build.compiler import compile_source, target
from warpsmith.backend.cuda.memory.driver import Device

ROUNDS, EACH = 400, 16  # groups of products, and products of one
SHARED = 65536


def on_word(text: str) -> str:
    return f'asm volatile("{text};" : "+r"(v[j]) : "r"(s));'


OPERATIONS = {
    "LOP3": on_word("lop3.b32 %0, %0, 0xf000f, 0, 0xc0"),
    "LOP3 of two": on_word("lop3.b32 %0, %0, %1, 0xf0f, 0x6a"),
    "SHF": on_word("shf.r.wrap.b32 %0, %0, %1, 8"),
    "PRMT": on_word("prmt.b32 %0, %0, %1, 0x4140"),
    "HMUL2": on_word("mul.rn.f16x2 %0, %0, %1"),
    "HFMA2 bf16": on_word("fma.rn.bf16x2 %0, %0, %1, %1"),
    "FMUL": on_word("mul.rn.f32 %0, %0, %1"),
    "FFMA": on_word("fma.rn.f32 %0, %0, %1, %1"),
    "IMAD": on_word("mad.lo.u32 %0, %0, %1, %1"),
    "LOP3, HMUL2": on_word("{ .reg .b32 t; lop3.b32 t, %0, 0xf000f, 0, 0xc0; mul.rn.f16x2 %0, t, %1; }"),
    "LDS.128": 'asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"'
    ' : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(at + j * 512));',
}
SOURCE = """
#include "common/wgmma.cuh"
constexpr int SUMS = COLUMNS / 2;
extern "C" __global__ void __launch_bounds__(512, 1) run(u32* out, long long* clocks, u32 s) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ volatile int done;
    if (threadIdx.x == 0) done = 0;
    for (int i = threadIdx.x; i < SHARED / 4; i += blockDim.x) ((u32*)memory)[i] = s * i & 0x3bff3bff;
    show_to_products();
    __syncthreads();
    const u32 base = (u32)__cvta_generic_to_shared(memory);
    const long long start = clock64();
    if (threadIdx.x >= 128) {
        u32 a[EACH][4];
        float sums[SUMS] = {};
        for (int i = 0; i < EACH; i++)
            for (int j = 0; j < 4; j++) a[i][j] = s * (threadIdx.x + i * 4 + j) & 0x000f000f;
#pragma unroll 1
        for (int round = 0; round < ROUNDS; round++) {
            products_begin();
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (MULTIPLY) multiply_group(sums, a[i], matrix_at<128, 256>((base >> 4) + i * (COLUMNS * 2)), 1);
            products_queued();
            products_done<0>();
            if (!MULTIPLY) __nanosleep(100);
        }
        if (threadIdx.x % 128 == 0) done = 1;
        if (threadIdx.x == 128) clocks[blockIdx.x * 2] = clock64() - start;
        float all = 0;
        for (int i = 0; i < SUMS; i++) all += sums[i];
        out[blockIdx.x * blockDim.x + threadIdx.x] = __float_as_uint(all);
    } else {
        u32 v[8], w[4] = {}, at = base + threadIdx.x % 32 * 16;
        for (int j = 0; j < 8; j++) v[j] = s * (threadIdx.x + j);
        long long count = 0;
#pragma unroll 1
        for (; !done; count += 512)
#pragma unroll
            for (int i = 0; i < 512; i++) {
                const int j = i % 8;
                OPERATION
            }
        if (threadIdx.x == 0) clocks[blockIdx.x * 2 + 1] = count;
        for (int j = 0; j < 8; j++) s += v[j] + w[j % 4];
        out[blockIdx.x * blockDim.x + threadIdx.x] = s;
    }
}
"""


def main() -> None:
    device = Device()
    sms = device.chip.sms
    out, clocks = device.zeros(sms * 512 * 4), device.zeros(sms * 16)
    arguments = ctypes.c_uint64(out.pointer), ctypes.c_uint64(clocks.pointer), ctypes.c_uint32(0x2C012C01)

    def clocks_of(columns: int, groups: int, operation: str, multiply: int) -> tuple[float, float]:
        constants = {"COLUMNS": columns, "MULTIPLY": multiply, "OPERATION": operation}
        constants |= {"ROUNDS": ROUNDS, "EACH": EACH, "SHARED": SHARED}
        image, _ = compile_source(SOURCE, "beside_products.cu", target(device.chip.capability), constants)
        kernel = device.load(image).kernel("run", SHARED)
        for _ in range(2):
            kernel.launch(sms, 128 * (groups + 1), *arguments)
        device.synchronize()
        took, count = clocks.read(np.int64, (sms, 2)).mean(axis=0)
        return took / (ROUNDS * EACH * groups), took / count

    for columns, groups in ((16, 2), (24, 1), (24, 2)):
        print(f"{columns} columns, {groups} groups: clocks of a product, of an instruction beside it, of one alone")
        for name, operation in OPERATIONS.items():
            product, beside = clocks_of(columns, groups, operation, 1)
            alone = clocks_of(columns, groups, operation, 0)[1]
            print(f"  {name:12} {product:6.2f} {beside:6.2f} {alone:6.2f}", flush=True)


if __name__ == "__main__":
    main()
