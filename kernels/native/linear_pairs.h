// Linear layers whose weights are bfloat16, where the CPU multiplies these in pairs.
//
// Weights are used as they are stored, x is packed. What a feed-forward layer is between its two halves is written
// packed at once. Inputs are multiples of PAIR_DEPTH, outputs of PAIR_ROWS.

#pragma once

#include <algorithm>
#include <vector>

#include "exp2.h"
#include "linear.h"
#include "pairs.h"

#if defined(PAIRS)

namespace {

constexpr i64 PAIR_STRIP = 32;           // rows of weights at once
constexpr i64 STRIPS_PER_TASK = 3;
constexpr i64 PAIR_ROWS_PER_TASK = 512;  // of x, at most,
constexpr i64 PAIR_NUMBERS = 384 << 10;  // and so many numbers: what is packed of them stays in the second cache
constexpr i64 PAIR_BLOCK = 2048;         // at most, along k
constexpr i64 FEW_PAIRS = 16384;         // so many numbers are packed before a second thread has begun

// x [rows, in] as [panel][in / 2][lanes] pairs; rows behind the last are zeros.
struct Packed {
    uint32_t* pairs;
    i64 rows, in, lanes, panels;
    Packed(void* memory, i64 rows_, i64 in_)
        : pairs(static_cast<uint32_t*>(memory)), rows(rows_), in(in_), lanes(rows_ > 16 ? 32 : 16),
          panels((rows_ + lanes - 1) / lanes) {}
    static size_t size(i64 rows, i64 in) { return size_t((rows + 31) / 32 * 32 * in) * 2; }
    uint32_t* at(i64 panel, i64 k) const { return pairs + (panel * in + k) / 2 * lanes; }
    i64 panels_per_task() const { return std::max(i64(1), std::min(PAIR_ROWS_PER_TASK, PAIR_NUMBERS / in) / lanes); }
    i64 groups() const { return (panels + panels_per_task() - 1) / panels_per_task(); }
};

// Which rows of weights a thread probably needs behind [n, n + size) of a task [begin, end): those that follow there,
// or the first of a task as many tasks on as there are threads.
inline i64 rows_behind(i64 n, i64 size, i64 begin, i64 end, int threads) {
    return n + size < end ? n + size : begin + threads * PAIR_STRIP * STRIPS_PER_TASK;
}

// The next 16 rows of weights at each of two places, of which the product with panel `number` of `count` fetches its
// part.
inline Fetch fetch_rows(const bf16* first, const bf16* second, i64 in, i64 number, i64 count) {
    const i64 lines = (16 + count - 1) / count, before = number * lines * in;
    return {first + before, second + before, int(lines)};
}

// row(m, memory) gives row m; it may write it to `memory` [in].
template <typename F>
bool pack_rows(const Packed& to, int threads, Parallel parallel, const F& row) {
    auto pack = [&](i64 task) {
        thread_local std::vector<float> memory;
        memory.resize(size_t(16 * to.in));
        const i64 first = task * 16;
        pack_pairs<float>(
            [&](int i) { return first + i < to.rows ? row(first + i, memory.data() + i * to.in) : nullptr; }, to.in,
            1.0f, to.lanes, to.at(first / to.lanes, 0) + first % to.lanes);
    };
    return for_each_task(to.panels * to.lanes / 16, to.rows * to.in < FEW_PAIRS ? 1 : threads, parallel, pack);
}

// A tile [n][m] of sums -> out [m][n].
inline void put_tile(const Linear& layer, const float* sums, i64 lanes, i64 first, i64 rows, float* out) {
    __m512i tile[16];
    for (int n = 0; n < 16; n++) tile[n] = _mm512_loadu_si512(sums + n * lanes);
    transpose(tile);
    const __m512 bias = layer.bias ? _mm512_loadu_ps(layer.bias + first) : _mm512_setzero_ps();
    for (i64 m = 0; m < rows; m++) {
        float* to = out + m * layer.out_features + first;
        __m512 x = _mm512_add_ps((__m512)tile[m], bias);
        if (layer.add) x = _mm512_add_ps(x, _mm512_loadu_ps(to));
        _mm512_storeu_ps(to, x);
    }
}

template <int N>
bool multiply_packed(const Packed& x, const Linear* layers, int count, int threads, Parallel parallel) {
    constexpr i64 PANELS = PAIR_ROWS_PER_TASK / (N * 16);
    const i64 blocks = (x.in + PAIR_BLOCK - 1) / PAIR_BLOCK;
    const i64 block = (x.in / PAIR_DEPTH + blocks - 1) / blocks * PAIR_DEPTH;
    auto work = [&](const Linear& layer, i64 begin, i64 end, i64 group) {
        alignas(64) thread_local float sums[PANELS][PAIR_STRIP * N * 16];
        const i64 first = group * x.panels_per_task(), last = std::min(first + x.panels_per_task(), x.panels);
        const bf16* w = static_cast<const bf16*>(layer.w);
        const Tiles tiles;
        for (i64 n = begin; n < end; n += PAIR_STRIP) {
            const i64 strip = std::min(PAIR_STRIP, end - n);
            for (i64 k = 0; k < x.in; k += block)
                for (i64 panel = first; panel < last; panel++) {
                    float* sum = sums[blocks == 1 ? 0 : panel - first];
                    const i64 behind = rows_behind(n, strip, begin, end, threads);
                    const bf16* next = w + behind * x.in;
                    const bool fetches = blocks == 1 && behind < layer.out_features;
                    const Fetch fetch =
                        fetches ? fetch_rows(next, next + 16 * x.in, x.in, panel - first, last - first) : Fetch();
                    multiply_pairs<N, Once::B>(tiles, Side(w + n * x.in + k, x.in), strip, x.at(panel, k),
                                               std::min(block, x.in - k), sum, k > 0, fetch);
                    if (k + block < x.in) continue;
                    for (i64 at = 0; at < strip; at += 16)
                        for (int i = 0; i < N; i++) {
                            const i64 m = panel * N * 16 + i * 16, left = std::min(i64(16), x.rows - m);
                            if (left > 0)
                                put_tile(layer, sum + at * N * 16 + i * 16, N * 16, n + at, left,
                                         layer.out + m * layer.out_features);
                        }
                }
        }
    };
    return for_each_strip(layers, count, PAIR_STRIP * STRIPS_PER_TASK, x.groups(), threads, parallel, work);
}

inline bool multiply_packed(const Packed& x, const Linear* layers, int count, int threads, Parallel parallel) {
    return x.lanes == 32 ? multiply_packed<2>(x, layers, count, threads, parallel)
                         : multiply_packed<1>(x, layers, count, threads, parallel);
}

// As good as a bfloat16 needs.
inline __m512 silu_roughly(__m512 x) {
    const __m512 exponent = _mm512_mul_ps(x, _mm512_set1_ps(float(-LOG2E)));
    const __m512 grown = exp2_roughly(_mm512_min_ps(_mm512_set1_ps(126.0f), exponent));
    return _mm512_mul_ps(x, _mm512_rcp14_ps(_mm512_add_ps(_mm512_set1_ps(1.0f), grown)));
}

// out = silu(gate of x) * (up of x); the two layers have as many outputs as `out` has inputs.
template <int N>
bool gate_packed(const Packed& x, const Linear& gate, const Linear& up, const Packed& out, int threads,
                 Parallel parallel) {
    auto work = [&](const Linear&, i64 begin, i64 end, i64 group) {
        alignas(64) float sums[2][16][N * 16];
        const i64 first = group * x.panels_per_task(), last = std::min(first + x.panels_per_task(), x.panels);
        const Tiles tiles;
        for (i64 n = begin; n < end; n += 16) {
            const bf16* w = static_cast<const bf16*>(gate.w) + n * x.in;
            // Both layers in one product: its first 16 rows are the gate's, the others lie as far behind as `up` does.
            const i64 between = static_cast<const bf16*>(up.w) - static_cast<const bf16*>(gate.w);
            const Side both(w, x.in, PAIR_DEPTH, between);
            for (i64 panel = first; panel < last; panel++) {
                const i64 behind = rows_behind(n, 16, begin, end, threads);
                const bf16* next = static_cast<const bf16*>(gate.w) + behind * x.in;
                const bool fetches = behind < gate.out_features;
                const Fetch fetch =
                    fetches ? fetch_rows(next, next + between, x.in, panel - first, last - first) : Fetch();
                multiply_pairs<N, Once::B>(tiles, both, 32, x.at(panel, 0), x.in, sums[0][0], false, fetch);
                uint32_t* to = out.at(panel, n);
                for (int i = 0; i < 16; i += 2)
                    for (int j = 0; j < N; j++) {
                        __m512 made[2];
                        for (int k = 0; k < 2; k++) {
                            __m512 g = _mm512_load_ps(sums[0][i + k] + j * 16);
                            __m512 u = _mm512_load_ps(sums[1][i + k] + j * 16);
                            if (gate.bias) g = _mm512_add_ps(g, _mm512_set1_ps(gate.bias[n + i + k]));
                            if (up.bias) u = _mm512_add_ps(u, _mm512_set1_ps(up.bias[n + i + k]));
                            made[k] = _mm512_mul_ps(silu_roughly(g), u);
                        }
                        _mm512_storeu_si512(to + (i / 2 * N + j) * 16, paired(made[0], made[1]));
                    }
            }
        }
    };
    return for_each_strip(&gate, 1, PAIR_STRIP * STRIPS_PER_TASK, x.groups(), threads, parallel, work);
}

inline bool gate_packed(const Packed& x, const Linear& gate, const Linear& up, const Packed& out, int threads,
                        Parallel parallel) {
    return x.lanes == 32 ? gate_packed<2>(x, gate, up, out, threads, parallel)
                         : gate_packed<1>(x, gate, up, out, threads, parallel);
}

}  // namespace

#endif
