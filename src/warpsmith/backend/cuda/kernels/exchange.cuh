// Activations cross between SMs in packets that carry their own arrival sign.
//
// A packet is 16 bytes: four floats rounded to 28 bits, and a 16-bit tag spread over the four lowest nibbles. It is
// written and read whole (one 128-bit access), so a reader polls the data itself: no fence, no counter, no second read.
// A tag names one exchange of one token; tags wrap, and the host clears all packets before one could come back.
// A buffer is written again only after every SM has published something later, which it does only after reading it:
// each buffer needs no second copy.
#pragma once
#include "ptx.cuh"

struct __align__(16) Packet {
    u32 word[4];
};

__device__ __forceinline__ u32 tagged(u32 bits, u32 tag, int i) { return (bits & ~15u) | ((tag >> (4 * i)) & 15u); }

__device__ __forceinline__ void store_packet(Packet* at, u32 w0, u32 w1, u32 w2, u32 w3) {
    asm volatile("{ .reg .b128 v; .reg .b64 l, h; mov.b64 l, {%1, %2}; mov.b64 h, {%3, %4}; mov.b128 v, {l, h};"
                 " st.relaxed.gpu.global.b128 [%0], v; }" ::"l"(at), "r"(w0), "r"(w1), "r"(w2), "r"(w3) : "memory");
}

__device__ __forceinline__ Packet load_packet(const Packet* at) {
    Packet p;
    asm volatile("{ .reg .b128 v; .reg .b64 l, h; ld.relaxed.gpu.global.b128 v, [%4]; mov.b128 {l, h}, v;"
                 " mov.b64 {%0, %1}, l; mov.b64 {%2, %3}, h; }"
                 : "=r"(p.word[0]), "=r"(p.word[1]), "=r"(p.word[2]), "=r"(p.word[3]) : "l"(at) : "memory");
    return p;
}

__device__ __forceinline__ bool arrived(const Packet& p, u32 tag) {
    const u32 difference = (p.word[0] ^ tag) | (p.word[1] ^ (tag >> 4)) | (p.word[2] ^ (tag >> 8)) | (p.word[3] ^ (tag >> 12));
    return (difference & 15u) == 0;
}

// 28 bits of a float, to nearest: 2^-21 relative.
__device__ __forceinline__ u32 round28(float v) { return __float_as_uint(v) + 8u; }

__device__ __forceinline__ void publish(Packet* at, float4 v, u32 tag) {
    store_packet(at, tagged(round28(v.x), tag, 0), tagged(round28(v.y), tag, 1), tagged(round28(v.z), tag, 2),
                 tagged(round28(v.w), tag, 3));
}

__device__ __forceinline__ float value(const Packet& p, int i) { return __uint_as_float(p.word[i] & ~15u); }
__device__ __forceinline__ float4 values(const Packet& p) { return {value(p, 0), value(p, 1), value(p, 2), value(p, 3)}; }

// Wait for COUNT packets, `stride` apart. All loads are in flight before the first is looked at.
template <int COUNT>
__device__ __forceinline__ void poll(Packet (&p)[COUNT], const Packet* at, int stride, u32 tag) {
    Watchdog dog;
    bool missing;
    do {
        missing = false;
#pragma unroll
        for (int i = 0; i < COUNT; i++) p[i] = load_packet(at + i * stride);
#pragma unroll
        for (int i = 0; i < COUNT; i++) missing |= !arrived(p[i], tag);
        dog.check();
    } while (missing);
}

__device__ __forceinline__ float4 poll_one(const Packet* at, u32 tag) {
    Packet p[1];
    poll(p, at, 0, tag);
    return values(p[0]);
}
