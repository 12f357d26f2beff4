"""How many clocks straight code takes on a GPU, by how much of it is run in turn: where its instruction caches end.

PYTHONPATH=src python bench/lab/instructions.py [--warps 4 8 12]

Blocks of 512 FMAs, 8 KB each, are run one after another, again and again, by all warps of every SM at the same time. A
kernel whose layers run more code than a cache holds fetches it again in every layer.
"""

from __future__ import annotations

import argparse
import ctypes

import numpy as np

from warpsmith.backend.cuda.build.compiler import compile_source, target
from warpsmith.backend.cuda.memory.driver import Device

BLOCKS, EACH, ROUNDS = 64, 512, 6
SIZES = (1, 2, 4, 5, 8, 12, 14, 15, 16, 17, 18, 20, 24, 32, 64)  # blocks
SOURCE = """
template <int NUMBER>
__device__ __forceinline__ void block(float (&v)[8], float a) {
#pragma unroll
    for (int i = 0; i < EACH; i++)
        asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(v[i % 8]) : "f"(a), "f"(a + NUMBER));
}
extern "C" __global__ void run(float* out, long long* clocks, int blocks, int rounds, float a) {
    float v[8] = {}, sum = 0;
    long long start = 0;
#pragma unroll 1
    for (int round = 0; round < rounds; round++) {
        if (round == 1) start = clock64();
#pragma unroll 1
        for (int i = 0; i < blocks; i++) {
            switch (i) { CASES }
            __syncthreads();
        }
    }
    if (threadIdx.x == 0) clocks[blockIdx.x] = clock64() - start;
    for (int i = 0; i < 8; i++) sum += v[i];
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warps", type=int, nargs="+", default=[4, 8, 12])
    given = parser.parse_args()
    device = Device()
    cases = " ".join(f"case {i}: block<{i}>(v, a); break;" for i in range(BLOCKS))
    image, _ = compile_source(SOURCE, "instructions.cu", target(device.chip.capability), {"EACH": EACH, "CASES": cases})
    kernel, sms = device.load(image).kernel("run", 0), device.chip.sms
    out, clocks = device.zeros(sms * 1024 * 4), device.zeros(sms * 8)
    print("KB of code        " + "".join(f"{blocks * EACH * 16 // 1024:6}" for blocks in SIZES))
    for warps in given.warps:
        took = []
        for blocks in SIZES:
            pointers = (ctypes.c_uint64(out.pointer), ctypes.c_uint64(clocks.pointer))
            for _ in range(2):
                numbers = (ctypes.c_int(blocks), ctypes.c_int(ROUNDS), ctypes.c_float(0.5))
                kernel.launch(sms, warps * 32, *pointers, *numbers)
            device.synchronize()
            took.append(clocks.read(np.int64, (sms,)).mean() / (ROUNDS - 1) / blocks / EACH)
        print(f"clocks, {warps:3} warps " + "".join(f"{clock:6.2f}" for clock in took), flush=True)


if __name__ == "__main__":
    main()
