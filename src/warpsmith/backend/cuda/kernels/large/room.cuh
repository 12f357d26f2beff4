// Where the ring, buffers of sums, `Shared` and barriers lie in shared memory. Included by a pass's shape.cuh.
#pragma once

constexpr int FREE = SHARED_MEMORY - SCRATCH_BYTES - SUMS_AFTER - SHARED_STRUCT - BARRIER_BYTES;
constexpr u32 RING_BYTES = FREE / 128 * 128;
// Barriers for as many slots as fit, and one more: the next slot is never the oldest.
constexpr int SLOTS = FREE / extreme_slot<1>() + 1;
// Where there is little room, one slot of the widest type must do; the others' are far smaller.
static_assert(FREE >= (ROOMY ? 2 : 1) * extreme_slot<-1>(), "no room for the ring");
// Buffers of sums: behind the ring if there is room for them, else in the scratch.
constexpr int SUMS_AT = SUMS_AFTER > 0 ? RING_AT + RING_BYTES : SUMS_INSIDE,
              SHARED_AT = RING_AT + RING_BYTES + SUMS_AFTER, BARRIERS_AT = SHARED_AT + SHARED_STRUCT;
constexpr int SPANS_AT = BARRIERS_AT + 8 * (2 * SLOTS + 2 * SUM_BUFFERS + 3);
constexpr int ISSUED_AT = SPANS_AT + 8 * SLOTS;  // how many slots there have been copies to, so far
static_assert(ISSUED_AT + 4 <= SHARED_MEMORY, "shared memory");
