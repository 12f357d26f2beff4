// Everything that is not a matrix times activations, as templates over a Simd struct: norms, gates, quantisation of
// activations, the DeltaNet step, and attention's online softmax.
#pragma once
#include <cmath>
#include <cstring>

#include "kernels.h"
#include "kernels_large.h"

namespace warpsmith {
namespace {

template <class S>
struct Vector {
    using F = typename S::F;
    using I = typename S::I;
    static constexpr int L = S::lanes;

    // e^x to about one unit in the last place: x = n ln 2 + r, a polynomial for e^r, n goes into the exponent.
    static F exp(F x) {
        x = S::min(S::max(x, S::set1(-87.0f)), S::set1(88.0f));
        const I n = S::round(S::mul(x, S::set1(1.44269504f)));
        const F whole = S::to_float(n);
        F r = S::fnma(x, whole, S::set1(0.693359375f));
        r = S::fnma(r, whole, S::set1(-2.12194440e-4f));
        F p = S::set1(1.0f / 720);
        p = S::fma(S::set1(1.0f / 120), p, r);
        p = S::fma(S::set1(1.0f / 24), p, r);
        p = S::fma(S::set1(1.0f / 6), p, r);
        p = S::fma(S::set1(0.5f), p, r);
        p = S::fma(S::set1(1.0f), p, r);
        p = S::fma(S::set1(1.0f), p, r);
        return S::mul(p, S::pow2(n));
    }
    static float exp1(float x) {
        float lanes[L];
        S::store(lanes, exp(S::set1(x)));
        return lanes[0];
    }
    static F sigmoid(F x) {
        const F one = S::set1(1.0f);
        return S::div(one, S::add(one, exp(S::sub(S::set1(0.0f), x))));
    }

    static float sum_squares(const float* x, int n) {
        F sum = S::set1(0.0f);
        for (int i = 0; i < n; i += L) {
            const F v = S::load(x + i);
            sum = S::fma(sum, v, v);
        }
        return S::reduce_add(sum);
    }

    static void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
        const F scale = S::set1(1.0f / sqrtf(sum_squares(x, n) / static_cast<float>(n) + eps));
        for (int i = 0; i < n; i += L) S::store(out + i, S::mul(S::mul(S::load(x + i), scale), S::load(weight + i)));
    }

    static void l2_norm(float* x, int n, float scale) {
        const F by = S::set1(scale / sqrtf(sum_squares(x, n) + 1e-6f));
        for (int i = 0; i < n; i += L) S::store(x + i, S::mul(S::load(x + i), by));
    }

    static void gated_norm(const float* x, const float* weight, const float* gate, int n, float eps, float* out) {
        const F scale = S::set1(1.0f / sqrtf(sum_squares(x, n) / static_cast<float>(n) + eps));
        for (int i = 0; i < n; i += L) {
            const F g = S::load(gate + i);
            const F normed = S::mul(S::mul(S::load(x + i), scale), S::load(weight + i));
            S::store(out + i, S::mul(normed, S::mul(g, sigmoid(g))));
        }
    }

    static void sigmoid_mul(const float* gate, const float* x, int n, float* out) {
        for (int i = 0; i < n; i += L) S::store(out + i, S::mul(sigmoid(S::load(gate + i)), S::load(x + i)));
    }

    static void silu_mul(const float* gate, const float* up, int rows, float* out, int stride) {
        for (int row = 0; row < rows; row++, gate += kPanel, up += kPanel, out += stride) {
            for (int i = 0; i < kPanel; i += L) {
                const F g = S::load(gate + i);
                S::store(out + i, S::mul(S::mul(g, sigmoid(g)), S::load(up + i)));
            }
        }
    }

    static void add(const float* tile, int rows, float* to, int stride) {
        for (int row = 0; row < rows; row++, tile += kPanel, to += stride) {
            for (int i = 0; i < kPanel; i += L) S::store(to + i, S::add(S::load(to + i), S::load(tile + i)));
        }
    }

    static void conv(const float* const* rows, const float* weight, int taps, int channels, int count, float* out) {
        for (int i = 0; i < count; i += L) {
            F sum = S::mul(S::load(weight + i), S::load(rows[0] + i));
            for (int t = 1; t < taps; t++) {
                sum = S::fma(sum, S::load(weight + static_cast<size_t>(t) * channels + i), S::load(rows[t] + i));
            }
            S::store(out + i, S::mul(sum, sigmoid(sum)));
        }
    }

    // N values -> int8 with one scale, and each sum of kSum of them.
    template <int N, int kSum>
    static float quantize_run(const float* x, int8_t* q, int32_t* sums) {
        static_assert(kSum % L == 0);
        F peak = S::set1(0.0f);
        for (int i = 0; i < N; i += L) peak = S::max(peak, S::abs(S::load(x + i)));
        const float most = S::reduce_max(peak);
        const F by = S::set1(most > 0 ? 127.0f / most : 0.0f);
        for (int i = 0; i < N; i += kSum) {
            I sum = S::zero();
            for (int j = i; j < i + kSum; j += L) {
                const F scaled = S::mul(S::load(x + j), by);  // NaN too becomes a byte: sums of bytes cannot overflow
                const I rounded = S::round(S::min(S::max(scaled, S::set1(-127.0f)), S::set1(127.0f)));
                S::store_i8(q + j, rounded);
                sum = j == i ? rounded : S::mla(sum, rounded, S::set1(1));
            }
            sums[i / kSum] = S::reduce_add(sum);
        }
        return most / 127.0f;
    }

    // Put a column's bytes of block b where types.h says they lie.
    static void place(const int8_t* bytes, int count, int b, int column, const Acts& acts, int8_t* to) {
        if (acts.n == 1) {
            std::memcpy(to + static_cast<size_t>(b) * count, bytes, count);
            return;
        }
        to += (static_cast<size_t>(b) * acts.padded() + column / 4 * 4) * count + column % 4 * 4;
        for (int i = 0; i < count; i += 4) std::memcpy(to + 4 * i, bytes + i, 4);
    }

    // A sum as 64 * high + low, for dot products of bytes.
    static void split(int32_t sum, int8_t& high, int8_t& low) {
        const int32_t sixty_fours = (sum + 32) >> 6;
        high = static_cast<int8_t>(sixty_fours);
        low = static_cast<int8_t>(sum - 64 * sixty_fours);
    }

    static void quantize(const float* x, int column, int forms, Acts& to) {
        alignas(64) int8_t q[256];
        int32_t sums[16];
        if (forms & kQ8Per256) {
            for (int b = 0; b < to.k / 256; b++) {
                const size_t at = static_cast<size_t>(b) * to.n + column;
                to.d256[at] = quantize_run<256, 16>(x + 256 * b, q, sums);
                place(q, 256, b, column, to, to.q256);
                int8_t parts[32];
                for (int i = 0; i < 8; i++) split(sums[2 * i] + sums[2 * i + 1], parts[i], parts[8 + i]);
                place(parts, 16, b, column, to, to.sums);
                if (forms & kSums16) {
                    for (int i = 0; i < 16; i++) split(sums[i], parts[i], parts[16 + i]);
                    place(parts, 32, b, column, to, to.sums16);
                }
                for (int i = 0; i < 16; i++) to.minus32[at * 16 + i] = -32 * sums[i];
            }
        }
        if (forms & kQ8Per32) {
            for (int b = 0; b < to.k / 32; b++) {
                const size_t at = to.small(b, column / 4 * 4, column % 4);
                to.d32[at] = quantize_run<32, 32>(x + 32 * b, q, sums);
                place(q, 32, b, column, to, to.q32);
                to.minus8[at] = -8 * sums[0];
                to.minus128[at] = -128 * sums[0];
            }
        }
    }

    static float dot(const float* x, const float* y, int n) {
        F sum = S::set1(0.0f);
        for (int i = 0; i < n; i += L) sum = S::fma(sum, S::load(x + i), S::load(y + i));
        return S::reduce_add(sum);
    }

    // Fetch a row of a block of states, if there is one.
    template <int W>
    static WARPSMITH_INLINE void fetch_row(const float* block, int row) {
        if (!block) return;
        WARPSMITH_UNROLL
        for (int i = 0; i < W; i += 16) S::prefetch(reinterpret_cast<const uint8_t*>(block + row * W + i));
    }

    // An update in registers. It is added by the operations of the step that it comes from.
    template <int W>
    struct Update {
        F decay, write[W / L];
        explicit Update(const DeltaUpdate& from) : decay(S::set1(from.decay)) {
            WARPSMITH_UNROLL
            for (int i = 0; i < W / L; i++) write[i] = S::load(from.write + i * L);
        }
        WARPSMITH_INLINE F add(int i, F state, F k) const { return S::fma(S::mul(decay, state), k, write[i]); }
    };

    // A column block of one head's state S [dk][W]: d = beta (v - decay k^T S); S' = decay S + k d^T; o = q^T S', which
    // is decay q^T S + (q k) d, so that one pass over S tells d and o. S is what it is once the update that is owed has
    // been added to it.
    template <int W, bool kKeep, bool kOutput>
    static void step(float* state, float* after, const DeltaStep& s) {
        constexpr int N = W / L;
        const float *keys = s.k, *queries = kOutput ? s.q : s.k;
        const int dk = s.dk;
        F read[N], asked[N], write[N];  // k^T S, q^T S, d
        WARPSMITH_UNROLL
        for (int i = 0; i < N; i++) read[i] = asked[i] = S::set1(0.0f);
        const auto rows = [&](const auto& row_of) {
            for (int r = 0; r < dk; r++) {
                const F k = S::set1(keys[r]), q = S::set1(queries[r]);
                if (!kKeep) fetch_row<W>(s.next, r);
                WARPSMITH_UNROLL
                for (int i = 0; i < N; i++) {
                    const F now = row_of(r, i);
                    read[i] = S::fma(read[i], k, now);
                    if (kOutput) asked[i] = S::fma(asked[i], q, now);
                }
            }
        };
        if (s.owed) {
            const Update<W> owed(*s.owed);
            const float* old_keys = s.owed->k;
            rows([&](int r, int i) WARPSMITH_INLINE_LAMBDA {
                float* at = state + r * W + i * L;
                const F now = owed.add(i, S::load(at), S::set1(old_keys[r]));
                S::store(at, now);
                return now;
            });
        } else {
            rows([&](int r, int i) WARPSMITH_INLINE_LAMBDA { return S::load(state + r * W + i * L); });
        }
        const F decay = S::set1(s.decay), beta = S::set1(s.beta);
        WARPSMITH_UNROLL
        for (int i = 0; i < N; i++) write[i] = S::mul(beta, S::fnma(S::load(s.v + i * L), decay, read[i]));
        if (s.write) {
            WARPSMITH_UNROLL
            for (int i = 0; i < N; i++) S::store(s.write + i * L, write[i]);
        }
        if (kOutput) {
            const F along = S::set1(dot(queries, keys, dk));
            WARPSMITH_UNROLL
            for (int i = 0; i < N; i++) S::store(s.out + i * L, S::fma(S::mul(decay, asked[i]), along, write[i]));
        }
        for (int r = 0; kKeep && r < dk; r++) {
            const F k = S::set1(keys[r]);
            fetch_row<W>(s.next, r);  // the state is in the first cache by now, and memory has nothing else to do
            WARPSMITH_UNROLL
            for (int i = 0; i < N; i++) {
                S::store(after + r * W + i * L, S::fma(S::mul(decay, S::load(state + r * W + i * L)), k, write[i]));
            }
        }
    }

    template <int W>
    static void step_of(float* state, float* after, const DeltaStep& s) {
        if (after && s.q) step<W, true, true>(state, after, s);
        else if (after) step<W, true, false>(state, after, s);
        else step<W, false, true>(state, after, s);
    }
    static void delta_step(float* state, float* after, const DeltaStep& s) {
        s.width == 32 ? step_of<32>(state, after, s) : step_of<16>(state, after, s);
    }

    template <int W>
    static void add_update(float* state, int dk, const DeltaUpdate& update) {
        const Update<W> owed(update);
        for (int r = 0; r < dk; r++) {
            const F k = S::set1(update.k[r]);
            WARPSMITH_UNROLL
            for (int i = 0; i < W / L; i++) {
                S::store(state + r * W + i * L, owed.add(i, S::load(state + r * W + i * L), k));
            }
        }
    }
    static void delta_add(float* state, int dk, int width, const DeltaUpdate& update) {
        width == 32 ? add_update<32>(state, dk, update) : add_update<16>(state, dk, update);
    }

    static void to_f16(const float* x, int n, uint8_t* out) {
        for (int i = 0; i < n; i += L) S::store_f16(out + 2 * i, S::load(x + i));
    }
    static void from_f16(const uint8_t* x, int n, float* out) {
        for (int i = 0; i < n; i += L) S::store(out + i, S::load_f16(x + 2 * i));
    }

    // Keys or values one after another, as floats or as they are kept.
    struct Floats {
        const float* rows;
        F load(size_t i) const { return S::load(rows + i); }
    };
    struct Halves {
        const uint8_t* rows;
        F load(size_t i) const { return S::load_f16(rows + 2 * i); }
    };

    // Products of Q queries with C keys; each is one chain of lanes over the width, whatever Q and C are.
    template <int Q, int C, class Rows>
    static void products(const float* q, int q_stride, Rows keys, int first, int width, float* scores) {
        F acc[Q][C];
        WARPSMITH_UNROLL
        for (int p = 0; p < Q; p++) {
            WARPSMITH_UNROLL
            for (int c = 0; c < C; c++) acc[p][c] = S::set1(0.0f);
        }
        for (int i = 0; i < width; i += L) {
            F key[C];
            WARPSMITH_UNROLL
            for (int c = 0; c < C; c++) key[c] = keys.load(static_cast<size_t>(first + c) * width + i);
            WARPSMITH_UNROLL
            for (int p = 0; p < Q; p++) {
                const F x = S::load(q + static_cast<size_t>(p) * q_stride + i);
                WARPSMITH_UNROLL
                for (int c = 0; c < C; c++) acc[p][c] = S::fma(acc[p][c], x, key[c]);
            }
        }
        WARPSMITH_UNROLL
        for (int p = 0; p < Q; p++) {
            WARPSMITH_UNROLL
            for (int c = 0; c < C; c++) scores[p * kChunkKeys + c] = S::reduce_add(acc[p][c]);
        }
    }

    // The softmax's step for one query: scores become weights. Returns how much what was there before fades.
    static float weigh(float* weight, int count, float& peak, float& sum) {
        F most = S::set1(peak);
        for (int i = 0; i < kChunkKeys; i += L) most = S::max(most, S::load(weight + i));
        const float now = S::reduce_max(most);
        const float fade = exp1(peak - now);
        for (int i = 0; i < kChunkKeys; i += L) S::store(weight + i, exp(S::sub(S::load(weight + i), S::set1(now))));
        sum *= fade;
        for (int i = 0; i < count; i++) sum += weight[i];
        peak = now;
        return fade;
    }

    // Q queries at a time: a key and a value are loaded once for all of them.
    template <int Q, class Rows>
    static void attend_some(const Queries& queries, int first, Rows keys, Rows values, int count) {
        const int width = queries.width;
        const float* q = queries.q + static_cast<size_t>(first) * queries.q_stride;
        float* running = queries.running + static_cast<size_t>(first) * (width + 2);
        alignas(64) float weight[Q][kChunkKeys];
        float fade[Q];
        for (int p = 0; p < Q; p++) {
            for (int j = count; j < kChunkKeys; j++) weight[p][j] = -INFINITY;
        }
        int j = 0;
        for (; j + 4 <= count; j += 4) products<Q, 4>(q, queries.q_stride, keys, j, width, weight[0] + j);
        for (; j < count; j++) products<Q, 1>(q, queries.q_stride, keys, j, width, weight[0] + j);
        for (int p = 0; p < Q; p++) {
            float* own = running + static_cast<size_t>(p) * (width + 2);
            fade[p] = weigh(weight[p], count, own[width], own[width + 1]);
        }
        constexpr int N = 32 / L;
        for (int i = 0; i < width; i += 32) {
            F acc[Q][N];
            WARPSMITH_UNROLL
            for (int p = 0; p < Q; p++) {
                const float* own = running + static_cast<size_t>(p) * (width + 2) + i;
                WARPSMITH_UNROLL
                for (int n = 0; n < N; n++) acc[p][n] = S::mul(S::load(own + n * L), S::set1(fade[p]));
            }
            for (int c = 0; c < count; c++) {
                F value[N];
                WARPSMITH_UNROLL
                for (int n = 0; n < N; n++) value[n] = values.load(static_cast<size_t>(c) * width + i + n * L);
                WARPSMITH_UNROLL
                for (int p = 0; p < Q; p++) {
                    const F w = S::set1(weight[p][c]);
                    WARPSMITH_UNROLL
                    for (int n = 0; n < N; n++) acc[p][n] = S::fma(acc[p][n], w, value[n]);
                }
            }
            WARPSMITH_UNROLL
            for (int p = 0; p < Q; p++) {
                float* own = running + static_cast<size_t>(p) * (width + 2) + i;
                WARPSMITH_UNROLL
                for (int n = 0; n < N; n++) S::store(own + n * L, acc[p][n]);
            }
        }
    }
    template <class Rows>
    static void attend_all(const Queries& queries, Rows keys, Rows values, int count) {
        int first = 0;
        for (; first + S::kQueries <= queries.count; first += S::kQueries) {
            attend_some<S::kQueries>(queries, first, keys, values, count);
        }
        for (; first < queries.count; first++) attend_some<1>(queries, first, keys, values, count);
    }
    static void attend(const Queries& queries, const float* keys, const float* values, int count) {
        attend_all(queries, Floats{keys}, Floats{values}, count);
    }
    static void attend_f16(const Queries& queries, const uint8_t* keys, const uint8_t* values, int count) {
        attend_all(queries, Halves{keys}, Halves{values}, count);
    }

    static void merge(const float* part, int width, float* running) {
        if (part[width + 1] == 0.0f) return;  // it saw no key
        const float now = part[width] > running[width] ? part[width] : running[width];
        const float old = exp1(running[width] - now), fresh = exp1(part[width] - now);
        for (int i = 0; i < width; i += L) {
            const F scaled = S::mul(S::load(running + i), S::set1(old));
            S::store(running + i, S::fma(scaled, S::load(part + i), S::set1(fresh)));
        }
        running[width] = now;
        running[width + 1] = running[width + 1] * old + part[width + 1] * fresh;
    }

    static float exp_sum(const float* x, int n, float peak) {
        const F top = S::set1(peak);
        F sum = S::set1(0.0f);
        int i = 0;
        for (; i + L <= n; i += L) sum = S::add(sum, exp(S::sub(S::load(x + i), top)));
        float total = S::reduce_add(sum);
        for (; i < n; i++) total += exp1(x[i] - peak);
        return total;
    }
};

template <class S>
constexpr Kernels kernels_of(const char* name) {
    using P = Panel<S>;
    using L = LargePanel<S>;
    using V = Vector<S>;
    return {
        name,
        {P::template floats<typename P::LoadF32>, P::template floats<typename P::LoadF16>,
         P::template floats<typename P::LoadBF16>, P::template small_blocks<Type::Q8_0>,
         P::template small_blocks<Type::Q4_0>, L::template large_blocks<Type::Q2_K>,
         L::template large_blocks<Type::Q3_K>, L::template large_blocks<Type::Q4_K>,
         L::template large_blocks<Type::Q5_K>, L::template large_blocks<Type::Q6_K>,
         L::template large_blocks<Type::Levels>},
        V::rms_norm, V::quantize, V::sigmoid_mul, V::silu_mul, V::add, V::conv, V::l2_norm, V::delta_step,
        V::delta_add, V::gated_norm, V::to_f16, V::from_f16, V::attend, S::kQueries > 1 ? V::attend_f16 : nullptr,
        V::merge, V::exp_sum,
    };
}

}  // namespace
}  // namespace warpsmith
