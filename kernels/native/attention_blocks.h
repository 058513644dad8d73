// Attention in float32: the query rows lie along the vector lanes, in panels of up to 3 vectors. A score is a broadcast
// key element times a vector of queries, so keys are read as they are stored, and values are again broadcast.

#pragma once

#include <vector>

#include "attention_parts.h"

namespace {

constexpr int WIDE = 3;                            // vectors of query rows in a full panel
constexpr int TILE = REGISTERS == 32 ? 8 : 4;      // keys, or dimensions of values, that a full panel takes at once
constexpr int TILE_NARROW = 8;                     // the same for a panel of one vector
constexpr int COLUMNS = 16;                        // values are packed in columns of these many dimensions

template <int M, int N>
inline void score_tile(const float* k, i64 stride, const float* q, int dim, float* s) {
    vf sum[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 3
        for (int n = 0; n < N; n++) sum[m][n] = vf{};
    for (int d = 0; d < dim; d++) {
        vf b[N];
#pragma GCC unroll 3
        for (int n = 0; n < N; n++) {
            b[n] = load(q + (i64(d) * N + n) * LANES);
            HOLD(b[n]);
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            vf a = splat(k[m * stride + d]);
#pragma GCC unroll 3
            for (int n = 0; n < N; n++) sum[m][n] += a * b[n];
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 3
        for (int n = 0; n < N; n++) store(s + (m * N + n) * LANES, sum[m][n]);
}

template <int M, int N>
inline void value_tile(const float* v, const float* p, int keys, const vf* decay, float* out) {
    vf sum[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 3
        for (int n = 0; n < N; n++) sum[m][n] = load(out + (m * N + n) * LANES) * decay[n];
    for (int key = 0; key < keys; key++) {
        vf b[N];
#pragma GCC unroll 3
        for (int n = 0; n < N; n++) {
            b[n] = load(p + (i64(key) * N + n) * LANES);
            HOLD(b[n]);
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            vf a = splat(v[i64(key) * COLUMNS + m]);
#pragma GCC unroll 3
            for (int n = 0; n < N; n++) sum[m][n] += a * b[n];
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 3
        for (int n = 0; n < N; n++) store(out + (m * N + n) * LANES, sum[m][n]);
}

struct Block {
    const float* k;
    i64 k_stride;
    const float* v;  // [columns of 16 dimensions][capacity][16]
    i64 capacity;
    i64 begin;
};

template <int N>
void attend_block(const Panel& panel, const Block& block, i64 begin, i64 end, int dim, int v_dim, float softcap,
                  const float* q, const int32_t* first, const int32_t* stop, float* s, const Found& found) {
    constexpr int M = N == 1 ? TILE_NARROW : TILE;
    const int keys = int(end - begin);
    const float* k = block.k + (begin - block.begin) * block.k_stride;
    int key = 0;
    for (; key + M <= keys; key += M) score_tile<M, N>(k + key * block.k_stride, block.k_stride, q, dim, s + key * N * LANES);
    for (; key < keys; key++) score_tile<1, N>(k + key * block.k_stride, block.k_stride, q, dim, s + key * N * LANES);
    vf decay[N];
    const bool masked = begin < panel.full_low || end > panel.full_high;
    weigh<N>(s, keys, int32_t(begin), first + panel.row, stop + panel.row, masked, softcap, found.peak + panel.row,
             found.total + panel.row, decay);
    float* out = found.out + panel.row * found.out_dim;
    for (int d = 0; d < v_dim; d += M) {
        const float* v = block.v + (d / COLUMNS * block.capacity + (begin - block.begin)) * COLUMNS + d % COLUMNS;
        value_tile<M, N>(v, s, keys, decay, out + i64(d) * N * LANES);
    }
}

template <typename T>
void pack_values(const T* v, i64 stride, int keys, int v_dim, i64 capacity, float* to) {
    for (int d = 0; d < v_dim; d += COLUMNS) {
        float* column = to + d / COLUMNS * capacity * COLUMNS;
        const int width = v_dim - d < COLUMNS ? v_dim - d : COLUMNS;
        if (width == COLUMNS) {
            for (int key = 0; key < keys; key++)
                for (int i = 0; i < COLUMNS; i++) column[key * COLUMNS + i] = to_float(v[key * stride + d + i]);
        } else {
            for (int key = 0; key < keys; key++)
                for (int i = 0; i < COLUMNS; i++)
                    column[key * COLUMNS + i] = i < width ? to_float(v[key * stride + d + i]) : 0.0f;
        }
    }
}

inline const float* as_floats(const float* k, i64, int, int, float*) { return k; }
inline const float* as_floats(const bf16* k, i64 stride, int keys, int dim, float* to) {
    for (int key = 0; key < keys; key++)
        for (int d = 0; d < dim; d++) to[i64(key) * dim + d] = to_float(k[key * stride + d]);
    return to;
}

template <typename Q>
void pack_queries(const Rows& rows, const std::vector<Panel>& panels, int dim, float scale, float* to) {
    for (const Panel& panel : panels) {
        const int width = panel.width * LANES;
        float* at = to + panel.row * dim;
        for (int lane = 0; lane < width; lane++) {
            const i64 row = panel.row + lane;
            if (row >= rows.count) {
                for (int d = 0; d < dim; d++) at[i64(d) * width + lane] = 0.0f;
                continue;
            }
            const i64 token = (rows.first_row + row) / rows.group, member = (rows.first_row + row) % rows.group;
            const Q* q = static_cast<const Q*>(rows.q) + token * rows.token_stride + member * rows.member_stride;
            for (int d = 0; d < dim; d++) at[i64(d) * width + lane] = to_float(q[d]) * scale;
        }
    }
}

template <typename T>
Found attend_blocks(const Rows& rows, const Keys& keys, const Softmax& softmax) {
    const float scale = score_scale(softmax);
    thread_local std::vector<Panel> panels;
    const i64 padded = make_panels(rows.count, WIDE, panels);
    const int out_dim = (keys.v_dim + COLUMNS - 1) / COLUMNS * COLUMNS;
    const int larger = keys.dim > out_dim ? keys.dim : out_dim;
    int step = 8192 / larger / 8 * 8;  // keys in a block: 32 KiB of them, and as much of values
    step = step < 32 ? 32 : step > 128 ? 128 : step;

    const i64 q_size = padded * keys.dim, out_size = padded * out_dim, s_size = i64(step) * WIDE * LANES;
    const i64 k_size = sizeof(T) == 4 ? 0 : i64(step) * keys.dim, v_size = i64(step) * out_dim;
    // each part begins at a multiple of 64 bytes
    auto round = [](i64 floats) { return (floats + 15) & ~i64(15); };
    const i64 size = round(q_size) + 2 * out_size + round(s_size) + round(k_size) + v_size + PerRow::SIZE * round(padded);
    attention_scratch.reserve(size_t(size) * 4);
    float* q = reinterpret_cast<float*>(attention_scratch.memory);
    float* out = q + round(q_size);
    float* sums = out + out_size;
    float* s = sums + out_size;
    float* k_copy = s + round(s_size);
    float* v_copy = k_copy + round(k_size);
    const PerRow kept(v_copy + v_size, round(padded));
    const Range all = see(rows, keys, panels, kept);
    std::memset(sums, 0, size_t(out_size) * 4);
    if (rows.q_is_bf16)
        pack_queries<bf16>(rows, panels, keys.dim, scale, q);
    else
        pack_queries<float>(rows, panels, keys.dim, scale, q);

    const Found found = {sums, kept.peak, kept.total, out_dim};
    const T* k = static_cast<const T*>(keys.k);
    const T* v = static_cast<const T*>(keys.v);
    for (i64 from = all.low; from < all.high; from += step) {
        const i64 to = from + step < all.high ? from + step : all.high;
        const T* block_k = k + from * keys.k_stride;
        const Block block = {as_floats(block_k, keys.k_stride, int(to - from), keys.dim, k_copy),
                             sizeof(T) == 4 ? keys.k_stride : keys.dim, v_copy, step, from};
        pack_values(v + from * keys.v_stride, keys.v_stride, int(to - from), keys.v_dim, step, v_copy);
        for (const Panel& panel : panels) {
            const i64 low = panel.low > from ? panel.low : from, high = panel.high < to ? panel.high : to;
            if (low >= high) continue;
            const float* panel_q = q + panel.row * keys.dim;
            auto run = panel.width == 3 ? attend_block<3> : panel.width == 2 ? attend_block<2> : attend_block<1>;
            run(panel, block, low, high, keys.dim, keys.v_dim, softmax.softcap, panel_q, kept.first, kept.stop, s,
                found);
        }
    }
    for (const Panel& panel : panels)
        for (int lane = 0; lane < panel.width * LANES; lane++)
            for (int d = 0; d < keys.v_dim; d++)
                out[(panel.row + lane) * out_dim + d] = sums[panel.row * out_dim + d * panel.width * LANES + lane];
    return {out, kept.peak, kept.total, out_dim};
}

}  // namespace
