// Attention of a few rows, bound by reading the keys and values: these are used as they lie, once, without a copy.

#pragma once

#include "attention_parts.h"

namespace {

typedef float v4 __attribute__((vector_size(16)));

constexpr int FEW = 4;                             // at most so many rows are computed by themselves, see `attend_few`
constexpr int FEW_KEYS = 32;                       // in their blocks
constexpr int AHEAD = 16;                          // keys that are fetched before they are needed then

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
typedef int32_t v4i __attribute__((vector_size(16)));
#define SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, v4i{i, j, k, l})
#endif

template <typename T>
inline void fetch(const T* p, int count) {
    for (int i = 0; i < count; i += 64 / int(sizeof(T))) fetch_line<3>(p + i);
}

// The sums of four vectors.
inline v4 sums(vf a, vf b, vf c, vf d) {
    vf whole[4] = {a, b, c, d};
    v4 part[4];
    for (int i = 0; i < 4; i++) {
        v4 quarter[LANES / 4];
        std::memcpy(quarter, &whole[i], sizeof quarter);
        part[i] = quarter[0];
        for (int j = 1; j < LANES / 4; j++) part[i] += quarter[j];
    }
    v4 ab = SHUFFLE(part[0], part[1], 0, 4, 2, 6) + SHUFFLE(part[0], part[1], 1, 5, 3, 7);
    v4 cd = SHUFFLE(part[2], part[3], 0, 4, 2, 6) + SHUFFLE(part[2], part[3], 1, 5, 3, 7);
    return SHUFFLE(ab, cd, 0, 1, 4, 5) + SHUFFLE(ab, cd, 2, 3, 6, 7);
}

// Scores s [R][FEW_KEYS] of R rows q [R][dim].
template <int R, typename T>
inline void few_scores(const T* k, i64 stride, int keys, const float* q, int dim, float* s) {
    for (int key = 0; key < keys; key += 4) {
        const T* at[4];
        for (int i = 0; i < 4; i++) at[i] = k + (key + i < keys ? key + i : keys - 1) * stride;
        vf sum[4][R];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
#pragma GCC unroll 3
            for (int r = 0; r < R; r++) sum[i][r] = vf{};
        for (int i = 0; i < 4; i++) fetch(k + (key + i + AHEAD) * stride, dim);
        for (int d = 0; d < dim; d += LANES) {
            vf b[R];
#pragma GCC unroll 3
            for (int r = 0; r < R; r++) {
                b[r] = load(q + r * dim + d);
                HOLD(b[r]);
            }
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                vf a = load(at[i] + d);
                HOLD(a);
#pragma GCC unroll 3
                for (int r = 0; r < R; r++) sum[i][r] += a * b[r];
            }
        }
#pragma GCC unroll 3
        for (int r = 0; r < R; r++) {
            v4 four = sums(sum[0][r], sum[1][r], sum[2][r], sum[3][r]);
            std::memcpy(s + r * FEW_KEYS + key, &four, sizeof four);
        }
    }
}

// Adds to out [R][v_dim] from `d` on, N vectors wide.
template <int R, int N, typename T>
inline void few_values(const T* v, i64 stride, int keys, const float* p, const float* decay, int v_dim, float* out) {
    vf sum[R][N];
#pragma GCC unroll 3
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) sum[r][n] = load(out + r * v_dim + n * LANES) * decay[r];
    for (int key = 0; key < keys; key++) {
        fetch(v + (key + AHEAD) * stride, N * LANES);
        vf b[R];
#pragma GCC unroll 3
        for (int r = 0; r < R; r++) b[r] = splat(p[r * FEW_KEYS + key]);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            vf a = load(v + key * stride + n * LANES);
            HOLD(a);
#pragma GCC unroll 3
            for (int r = 0; r < R; r++) sum[r][n] += a * b[r];
        }
    }
#pragma GCC unroll 3
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) store(out + r * v_dim + n * LANES, sum[r][n]);
}

// The same as `weigh` for one row, whose scores lie one behind the other; it sees those from `low` to before `high`.
inline float weigh_row(float* s, i64 keys, i64 low, i64 high, float softcap, float* peak, float* total) {
    if (softcap != 0)
        for (i64 key = 0; key < keys; key += LANES) store(s + key, capped(load(s + key), softcap));
    for (i64 key = 0; key < low && key < keys; key++) s[key] = -INF;
    for (i64 key = high > 0 ? high : 0; key < (keys + LANES - 1) / LANES * LANES; key++) s[key] = -INF;
    vf tops = splat(*peak), sum = vf{};
    for (i64 key = 0; key < keys; key += LANES) {
        vf x = load(s + key);
        tops = x > tops ? x : tops;
    }
    float top = tops[0], added = 0.0f;
    for (int i = 1; i < LANES; i++) top = tops[i] > top ? tops[i] : top;
    const float shift = top == -INF ? 0.0f : top;
    for (i64 key = 0; key < keys; key += LANES) {
        vf p = exp2(load(s + key) - shift);
        sum += p;
        store(s + key, p);
    }
    for (int i = 0; i < LANES; i++) added += sum[i];
    const float decay = std::exp2(*peak - shift);
    *total = *total * decay + added;
    *peak = top;
    return decay;
}

template <int R, typename T>
void few_block(const T* k, const T* v, const Keys& keys, i64 from, i64 to, const Range* seen, const Softmax& softmax,
               const float* q, float* s, float* out, float* peak, float* total) {
    const int count = int(to - from);
    few_scores<R>(k, keys.k_stride, count, q, keys.dim, s);
    float decay[R];
    for (int r = 0; r < R; r++) {
        const i64 low = seen[r].low - from, high = (seen[r].high < to ? seen[r].high : to) - from;
        decay[r] = weigh_row(s + r * FEW_KEYS, count, low, high, softmax.softcap, peak + r, total + r);
    }
    int d = 0;
    for (; d + 4 * LANES <= keys.v_dim; d += 4 * LANES)
        few_values<R, 4>(v + d, keys.v_stride, count, s, decay, keys.v_dim, out + d);
    for (; d < keys.v_dim; d += LANES)
        few_values<R, 1>(v + d, keys.v_stride, count, s, decay, keys.v_dim, out + d);
}

template <typename T>
Found attend_few(const Rows& rows, const Keys& keys, const Softmax& softmax) {
    const float scale = score_scale(softmax);
    const int count = int(rows.count);
    const i64 q_size = count * keys.dim, out_size = count * keys.v_dim;
    attention_scratch.reserve(size_t(q_size + out_size + FEW * (FEW_KEYS + 2)) * 4);
    float* q = reinterpret_cast<float*>(attention_scratch.memory);
    float* out = q + q_size;
    float* s = out + out_size;
    float* peak = s + FEW * FEW_KEYS;
    float* total = peak + FEW;
    Range seen[FEW];
    i64 begin = keys.end, end = keys.begin;
    for (int r = 0; r < count; r++) {
        seen[r] = range(rows, keys, r);
        begin = seen[r].low < begin ? seen[r].low : begin;
        end = seen[r].high > end ? seen[r].high : end;
        const i64 token = (rows.first_row + r) / rows.group, member = (rows.first_row + r) % rows.group;
        const i64 at = token * rows.token_stride + member * rows.member_stride;
        for (int d = 0; d < keys.dim; d++)
            q[r * keys.dim + d] = scale * (rows.q_is_bf16 ? to_float(static_cast<const bf16*>(rows.q)[at + d])
                                                          : static_cast<const float*>(rows.q)[at + d]);
        peak[r] = -INF;
        total[r] = 0.0f;
    }
    std::memset(out, 0, size_t(out_size) * 4);
    for (i64 from = begin; from < end; from += FEW_KEYS) {
        const i64 to = from + FEW_KEYS < end ? from + FEW_KEYS : end;
        const T* k = static_cast<const T*>(keys.k) + from * keys.k_stride;
        const T* v = static_cast<const T*>(keys.v) + from * keys.v_stride;
        for (int r = 0; r < count;) {
            const int left = count - r, together = left == 4 ? 2 : left;
            auto run = together == 3 ? few_block<3, T> : together == 2 ? few_block<2, T> : few_block<1, T>;
            run(k, v, keys, from, to, seen + r, softmax, q + r * keys.dim, s, out + r * keys.v_dim, peak + r, total + r);
            r += together;
        }
    }
    return {out, peak, total, keys.v_dim};
}

}  // namespace
