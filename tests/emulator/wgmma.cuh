// What kernels/common/wgmma.cuh names, on the emulated machine.
#pragma once
#include "common/halves.cuh"

// --- a counter that all SMs share -----------------------------------------------------------------------------------

inline void add_release(u32* at, u32 count) { *at += count, machine::progress(); }
inline u32 load_acquire(const u32* at) { return *at; }

// --- wgmma: a warp's 16 rows, done at once ----------------------------------------------------------------------------

template <int ALONG_K, int ALONG_N>
inline u64 matrix_at(u32 sixteens) { return (u64)(ALONG_N >> 4) << 32 | (sixteens | (u32)(ALONG_K >> 4) << 16); }
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool PRODUCTS_QUEUE = true;
#else
constexpr bool PRODUCTS_QUEUE = false;
#endif
inline void show_to_products() {}
inline void products_begin() {}
inline void products_queued() {}
template <int LEFT>
inline void products_done() {}
template <int COUNT>
inline void multiply_group(float (&d)[COUNT], const u32 (&a)[4], u64 b, int keep) {
    const u8* base = shared_pointer((u32)(b & 0x3fff) << 4);
    const u32 along_k = (u32)(b >> 16 & 0x3fff) << 4, along_n = (u32)(b >> 32 & 0x3fff) << 4;
    const u64 generation = machine::current->warp->generation;
    machine::collect(Operands{{a[0], a[1], a[2], a[3]}, {}}, [&] {
        for (int octet = 0; octet < COUNT / 4; octet++) {
            const auto column = [&](int c, int q, int half) {
                return ((const u32*)(base + octet * along_n + half * along_k + c * 16))[q];
            };
            const auto unpack = [](u32 v) { return unpack_half(v); };
            multiply_rows(machine::current->warp->products[generation & 1][octet], generation, unpack, column);
        }
    });
    for (int i = 0; i < COUNT; i++) d[i] = (float)((keep ? d[i] : 0.0f) + product(generation, i / 4, i % 4));
}
