// Which types of slabs a pass has, and slots of its ring. Included by its shape.cuh.
#pragma once

__host__ __device__ constexpr bool has_type(int type) { return SLAB_TYPE_MASK >> type & 1; }
// Superblocks of a slot of the ring, for 64 rows; bytes of the smallest (SIGN 1) or largest (SIGN -1) slot there is.
constexpr bool ROOMY = SHARED_MEMORY >= 160 << 10;  // else: a chip for games
// Superblocks that lie together (a parcel, see deal.py), and of a slot: a parcel where there is room for that.
__host__ __device__ constexpr int parcel_blocks(int type) { return 2 * 4 * slab_bytes(type) <= 28 << 10 ? 2 : 1; }
__host__ __device__ constexpr int slot_blocks(int type) { return ROOMY ? parcel_blocks(type) : 1; }
template <int SIGN>
__host__ __device__ constexpr int extreme_slot() {
    int bytes = 0;
    for (int t = 0; t < SLAB_TYPES; t++) {
        const int slot = slot_blocks(t) * 4 * slab_bytes(t);
        if (has_type(t) && (bytes == 0 || SIGN * slot < SIGN * bytes)) bytes = slot;
    }
    return bytes;
}
