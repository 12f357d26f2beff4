// Products of flash attention on sm_90a, fp16 operands and f32 sums (d = (keep ? d : 0) + a b): scores: 64 queries x 64
// keys, both operands in shared memory, K-major; weighted values: 64 queries x 256 dimensions, weights in registers,
// values in shared memory with the dimensions contiguous.
#pragma once
#include "prefill/async.cuh"

#define SUMS4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS8(i) SUMS4(i), SUMS4(i + 4)

__device__ __forceinline__ void wgmma_scores(float* d, u64 a, u64 b, bool keep) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0;"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
        "}, %32, %33, p, 1, 1, 0, 0; }"
        : SUMS8(0), SUMS8(8), SUMS8(16), SUMS8(24)
        : "l"(a), "l"(b), "r"((u32)keep));
}
__device__ __forceinline__ void wgmma_values(float* d, const u32* a, u64 b) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %133, 0;"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
        "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
        "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
        "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
        "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
        "}, {%128,%129,%130,%131}, %132, p, 1, 1, 1; }"
        : SUMS8(0), SUMS8(8), SUMS8(16), SUMS8(24), SUMS8(32), SUMS8(40), SUMS8(48), SUMS8(56), SUMS8(64), SUMS8(72),
          SUMS8(80), SUMS8(88), SUMS8(96), SUMS8(104), SUMS8(112), SUMS8(120)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1u));
}
#undef SUMS8
#undef SUMS4
