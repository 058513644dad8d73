// Attention of one layer on a CPU, with the running softmax of arXiv:1805.02867 in the blocks of arXiv:2205.14135.
//
// Everything is computed transposed: the query rows lie along the vector lanes, in panels of up to 3 vectors. A score
// is then a broadcast key element times a vector of queries, so keys are read as they are stored, the softmax runs down
// the lanes without a horizontal step, and values are again broadcast. Scores are kept in units of log 2.
//
// NaN has to stay NaN and a row that sees no key has to come out as 0, so this is not compiled with -ffast-math, and
// the order of operands in `at_least`, `at_most` and the maximum matters.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "attention.h"
#include "exp2.h"
#include "lanes.h"
#include "scratch.h"

namespace {

typedef int32_t vi_unaligned __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

typedef float v4 __attribute__((vector_size(16)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));

struct bf16 {
    uint16_t bits;
};

constexpr int WIDE = 3;                            // vectors of query rows in a full panel
constexpr int TILE = REGISTERS == 32 ? 8 : 4;      // keys, or dimensions of values, that a full panel takes at once
constexpr int TILE_NARROW = 8;                     // the same for a panel of one vector
constexpr int COLUMNS = 16;                        // values are packed in columns of these many dimensions
constexpr int FEW = 4;                             // at most so many rows are computed by themselves, see `attend_few`
constexpr int FEW_KEYS = 32;                       // in their blocks
constexpr int AHEAD = 16;                          // keys that are fetched before they are needed then
constexpr float INF = std::numeric_limits<float>::infinity();
constexpr double LN2 = 0.6931471805599453;

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
typedef int32_t v4i __attribute__((vector_size(16)));
#define SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, v4i{i, j, k, l})
#endif

inline vf load(const bf16* p) {
    vh bits;
    std::memcpy(&bits, p, sizeof bits);
    return (vf)(__builtin_convertvector(bits, vu) << 16);
}
inline vi load(const int32_t* p) { return *reinterpret_cast<const vi_unaligned*>(p); }

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
inline bf16 to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return {x != x ? uint16_t((bits >> 16) | 0x40) : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

// softcap * tanh(x / softcap) in log 2, of a score that came multiplied by 2 / softcap.
inline vf capped(vf x, float softcap) {
    const float cap = float(softcap * LOG2E);
    return cap - 2.0f * cap / (1.0f + exp2(at_most(x, 126.0f)));
}

thread_local Scratch scratch;

// Rows that are computed together over one KV head: row r is token r / group, member r % group.
struct Rows {
    const void* q;
    bool q_is_bf16;
    i64 token_stride, member_stride;
    i64 first_row, count;
    int group;
    i64 position;  // of token 0, counted in these keys; the next tokens stand behind it
    const i64* positions;  // or each token's own
    i64 window;
    i64 at(i64 row) const {
        i64 token = (first_row + row) / group;
        return positions ? positions[token] : position + token;
    }
};

struct Keys {
    const void *k, *v;
    i64 k_stride, v_stride;
    i64 begin, end;
    int dim, v_dim;
};

struct Range {
    i64 low, high;  // the keys that a row sees: low <= key < high
};

inline Range range(const Rows& rows, const Keys& keys, i64 row) {
    const i64 at = rows.at(row), low = at - rows.window + 1, high = at + 1;
    return {low < keys.begin ? keys.begin : low > keys.end ? keys.end : low,
            high < keys.begin ? keys.begin : high > keys.end ? keys.end : high};
}

struct Softmax {
    float scale, softcap;  // softcap 0: none
};

struct Panel {
    int width;  // in vectors
    i64 row;
    int32_t low, high, full_low, full_high;  // keys that some row sees; keys that all rows see
};

// What `attend` leaves, not yet divided by `total`; `peak` in log 2. `out` is [v_dim][panel width] for each panel, or
// [rows][v_dim] where there are no panels.
struct Found {
    const std::vector<Panel>* panels;
    float *out, *peak, *total;
    i64 out_dim;
};

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

// Scores -> weights of one block, in place; `decay` is what the sums of the earlier blocks have to be multiplied by.
template <int N>
inline void weigh(float* s, int keys, int32_t key0, const int32_t* first, const int32_t* stop, bool masked,
                  float softcap, float* peak, float* total, vf* decay) {
    vf top[N], shift[N], sum[N];
    for (int n = 0; n < N; n++) top[n] = load(peak + n * LANES);
    if (masked || softcap != 0) {
        vi low[N], high[N];
        for (int n = 0; n < N; n++) low[n] = load(first + n * LANES), high[n] = load(stop + n * LANES);
        for (int key = 0; key < keys; key++) {
            vi position = (key0 + key) - vi{};
            for (int n = 0; n < N; n++) {
                float* at = s + (i64(key) * N + n) * LANES;
                vf x = load(at);
                if (softcap != 0) x = capped(x, softcap);
                if (masked) x = ((position >= low[n]) & (position < high[n])) ? x : splat(-INF);
                store(at, x);
            }
        }
    }
    for (int key = 0; key < keys; key++)
        for (int n = 0; n < N; n++) {
            vf x = load(s + (i64(key) * N + n) * LANES);
            top[n] = x > top[n] ? x : top[n];  // skips NaN, whose weight is NaN below
        }
    for (int n = 0; n < N; n++) {
        shift[n] = top[n] == splat(-INF) ? vf{} : top[n];  // nothing seen yet: shifted by 0, so that nothing becomes NaN
        decay[n] = exp2(load(peak + n * LANES) - shift[n]);
        sum[n] = vf{};
    }
    for (int key = 0; key < keys; key++)
        for (int n = 0; n < N; n++) {
            float* at = s + (i64(key) * N + n) * LANES;
            vf p = exp2(load(at) - shift[n]);
            sum[n] += p;
            store(at, p);
        }
    for (int n = 0; n < N; n++) {
        store(total + n * LANES, load(total + n * LANES) * decay[n] + sum[n]);
        store(peak + n * LANES, top[n]);
    }
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
inline void fetch(const T* p, int count) {
    for (int i = 0; i < count; i += 64 / int(sizeof(T))) __builtin_prefetch(p + i);
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

// A few rows are bound by reading the keys and values: these are used as they lie, once, without a copy.
template <typename T>
Found attend_few(const Rows& rows, const Keys& keys, const Softmax& softmax, float scale) {
    const int count = int(rows.count);
    const i64 q_size = count * keys.dim, out_size = count * keys.v_dim;
    scratch.reserve(size_t(q_size + out_size + FEW * (FEW_KEYS + 2)) * 4);
    float* q = reinterpret_cast<float*>(scratch.memory);
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
    return {nullptr, out, peak, total, keys.v_dim};
}

template <typename T>
Found attend(const Rows& rows, const Keys& keys, const Softmax& softmax) {
    const double scale = softmax.scale * LOG2E * (softmax.softcap != 0 ? 2.0 / softmax.softcap : 1.0);
    if (rows.count <= FEW && keys.dim % LANES == 0 && keys.v_dim % LANES == 0)
        return attend_few<T>(rows, keys, softmax, float(scale));
    thread_local std::vector<Panel> panels;
    panels.clear();
    i64 padded = 0;
    while (padded < rows.count) {
        const i64 left = rows.count - padded;
        const int width = left >= WIDE * LANES ? WIDE : int((left + LANES - 1) / LANES);
        panels.push_back({width, padded, 0, 0, 0, 0});
        padded += width * LANES;
    }
    const int out_dim = (keys.v_dim + COLUMNS - 1) / COLUMNS * COLUMNS;
    const int larger = keys.dim > out_dim ? keys.dim : out_dim;
    int step = 8192 / larger / 8 * 8;  // keys in a block: 32 KiB of them, and as much of values
    step = step < 32 ? 32 : step > 128 ? 128 : step;

    const i64 q_size = padded * keys.dim, out_size = padded * out_dim, s_size = i64(step) * WIDE * LANES;
    const i64 k_size = sizeof(T) == 4 ? 0 : i64(step) * keys.dim, v_size = i64(step) * out_dim;
    // each part begins at a multiple of 64 bytes
    auto round = [](i64 floats) { return (floats + 15) & ~i64(15); };
    scratch.reserve(size_t(round(q_size) + out_size + round(s_size) + round(k_size) + v_size + 4 * round(padded)) * 4);
    float* q = reinterpret_cast<float*>(scratch.memory);
    float* out = q + round(q_size);
    float* s = out + out_size;
    float* k_copy = s + round(s_size);
    float* v_copy = k_copy + round(k_size);
    float* peak = v_copy + v_size;
    float* total = peak + round(padded);
    int32_t* first = reinterpret_cast<int32_t*>(total + round(padded));
    int32_t* stop = first + round(padded);

    i64 begin = keys.end, end = keys.begin;
    for (Panel& panel : panels) {
        panel.low = panel.full_high = std::numeric_limits<int32_t>::max();
        panel.high = panel.full_low = 0;
        for (int lane = 0; lane < panel.width * LANES; lane++) {
            const i64 row = panel.row + lane;
            const Range seen = range(rows, keys, row < rows.count ? row : rows.count - 1);
            first[row] = int32_t(seen.low);
            stop[row] = int32_t(seen.high);
            panel.low = first[row] < panel.low ? first[row] : panel.low;
            panel.full_low = first[row] > panel.full_low ? first[row] : panel.full_low;
            panel.high = stop[row] > panel.high ? stop[row] : panel.high;
            panel.full_high = stop[row] < panel.full_high ? stop[row] : panel.full_high;
            peak[row] = -INF;
            total[row] = 0.0f;
        }
        begin = panel.low < begin ? panel.low : begin;
        end = panel.high > end ? panel.high : end;
    }
    std::memset(out, 0, size_t(out_size) * 4);
    if (rows.q_is_bf16)
        pack_queries<bf16>(rows, panels, keys.dim, float(scale), q);
    else
        pack_queries<float>(rows, panels, keys.dim, float(scale), q);

    const Found found = {&panels, out, peak, total, out_dim};
    const T* k = static_cast<const T*>(keys.k);
    const T* v = static_cast<const T*>(keys.v);
    for (i64 from = begin; from < end; from += step) {
        const i64 to = from + step < end ? from + step : end;
        const T* block_k = k + from * keys.k_stride;
        const Block block = {as_floats(block_k, keys.k_stride, int(to - from), keys.dim, k_copy),
                             sizeof(T) == 4 ? keys.k_stride : keys.dim, v_copy, step, from};
        pack_values(v + from * keys.v_stride, keys.v_stride, int(to - from), keys.v_dim, step, v_copy);
        for (const Panel& panel : panels) {
            const i64 low = panel.low > from ? panel.low : from, high = panel.high < to ? panel.high : to;
            if (low >= high) continue;
            const float* panel_q = q + panel.row * keys.dim;
            auto run = panel.width == 3 ? attend_block<3> : panel.width == 2 ? attend_block<2> : attend_block<1>;
            run(panel, block, low, high, keys.dim, keys.v_dim, softmax.softcap, panel_q, first, stop, s, found);
        }
    }
    return found;
}

template <typename F>
void for_each_row(const Found& found, i64 count, const F& visit) {
    if (found.panels == nullptr) {
        for (i64 row = 0; row < count; row++) visit(row, found.out + row * found.out_dim, i64(1));
        return;
    }
    for (const Panel& panel : *found.panels)
        for (int lane = 0; lane < panel.width * LANES && panel.row + lane < count; lane++)
            visit(panel.row + lane, found.out + panel.row * found.out_dim + lane, i64(panel.width) * LANES);
}

// One call, cut into tasks.
struct PrefixWork {
    const PrefixCall& c;
    i64 rows, blocks, step, tasks;

    explicit PrefixWork(const PrefixCall& call) : c(call) {
        rows = c.tokens * c.group;
        blocks = (rows + c.rows_per_task - 1) / c.rows_per_task;
        step = ((c.keys - c.begin + c.parts - 1) / c.parts + 15) / 16 * 16;
        tasks = c.kv_heads * c.parts * blocks;
    }

    void run(i64 task) const {
        const i64 q_size = c.q_type ? 2 : 4, kv_size = c.kv_type ? 2 : 4;
        const i64 head = task / (c.parts * blocks), part = task / blocks % c.parts;
        const i64 first_row = (blocks - 1 - task % blocks) * c.rows_per_task;  // later rows see more keys: first
        const i64 count = rows - first_row < c.rows_per_task ? rows - first_row : c.rows_per_task;
        const i64 begin = c.begin + part * step < c.keys ? c.begin + part * step : c.keys;
        const i64 end = begin + step < c.keys ? begin + step : c.keys;
        const Rows these = {static_cast<const char*>(c.q) + head * c.q_head * q_size, c.q_type == 1, c.q_token,
                            c.q_member, first_row, count, int(c.group), c.keys - c.tokens, c.positions, c.window};
        const Keys keys = {static_cast<const char*>(c.k) + head * c.k_head * kv_size,
                           static_cast<const char*>(c.v) + head * c.v_head * kv_size,
                           c.k_token, c.v_token, begin, end, int(c.dim), int(c.v_dim)};
        const Softmax softmax = {float(c.scale), float(c.softcap)};
        const Found found = c.kv_type ? attend<bf16>(these, keys, softmax) : attend<float>(these, keys, softmax);
        for_each_row(found, count, [&](i64 row, const float* values, i64 width) {
            const i64 to = (part * c.kv_heads + head) * rows + first_row + row;
            const float total = found.total[row], share = total == 0 ? 0.0f : 1.0f / total;
            for (i64 d = 0; d < c.v_dim; d++) c.out[to * c.v_dim + d] = values[d * width] * share;
            c.lse[to] = float((found.peak[row] + std::log2(double(total))) * LN2);
        });
    }
};

struct OwnWork {
    struct Piece {
        i64 slot, first, tokens, packed;  // tokens [first, first + tokens) of a slot, which are packed from `packed` on
    };
    const OwnCall& c;
    std::vector<Piece> pieces;
    i64 tasks;

    explicit OwnWork(const OwnCall& call) : c(call) {
        const i64 most = c.rows_per_task / c.group > 1 ? c.rows_per_task / c.group : 1;
        i64 packed = 0;
        for (i64 slot = 0; slot < c.slots; slot++) {
            for (i64 first = 0; first < c.counts[slot]; first += most) {
                const i64 left = c.counts[slot] - first, tokens = left < most ? left : most;
                pieces.push_back({slot, first, tokens, packed});
                packed += tokens;
            }
        }
        tasks = i64(pieces.size()) * c.kv_heads;
    }

    void run(i64 task) const {
        const i64 q_size = c.q_type ? 2 : 4, kv_size = c.kv_type ? 2 : 4, all = c.tokens * c.group;
        const Piece& piece = pieces[size_t(task / c.kv_heads)];
        const i64 head = task % c.kv_heads;
        const i64 position = c.lengths[piece.slot] + piece.first, end = position + piece.tokens;
        const Rows rows = {static_cast<const char*>(c.q) + (head * c.q_head + piece.packed * c.q_token) * q_size,
                           c.q_type == 1, c.q_token, c.q_member, 0, piece.tokens * c.group, int(c.group), position,
                           nullptr, c.window};
        const Keys keys = {static_cast<const char*>(c.k) + (piece.slot * c.k_slot + head * c.k_head) * kv_size,
                           static_cast<const char*>(c.v) + (piece.slot * c.v_slot + head * c.v_head) * kv_size,
                           c.k_token, c.v_token, 0, end, int(c.dim), int(c.v_dim)};
        const Softmax softmax = {float(c.scale), float(c.softcap)};
        const Found found = c.kv_type ? attend<bf16>(rows, keys, softmax) : attend<float>(rows, keys, softmax);
        thread_local std::vector<float> merged;
        for_each_row(found, rows.count, [&](i64 row, const float* values, i64 width) {
            const i64 token = piece.packed + row / c.group, member = row % c.group;
            const i64 folded = head * all + token * c.group + member, query_head = head * c.group + member;
            // The parts of the document, the own keys and the sink, each weighed by its share of all exponentials.
            const float own_peak = float(found.peak[row] * LN2);
            float peak = own_peak;
            if (c.sinks && c.sinks[query_head] > peak) peak = c.sinks[query_head];
            for (i64 part = 0; part < c.parts; part++) {
                const float lse = c.shared_lse[part * c.kv_heads * all + folded];
                if (lse > peak) peak = lse;
            }
            const float shift = peak == -INF ? 0.0f : peak;
            const float own = std::exp(own_peak - shift);
            float total = own * found.total[row];
            if (c.sinks) total += std::exp(c.sinks[query_head] - shift);
            merged.resize(size_t(c.v_dim));
            for (i64 d = 0; d < c.v_dim; d++) merged[d] = values[d * width] * own;
            for (i64 part = 0; part < c.parts; part++) {
                const i64 at = part * c.kv_heads * all + folded;
                const float weight = std::exp(c.shared_lse[at] - shift);
                total += weight;
                for (i64 d = 0; d < c.v_dim; d++) merged[d] += c.shared[at * c.v_dim + d] * weight;
            }
            const float share = total == 0 ? 0.0f : 1.0f / total;
            const i64 to = (token * c.kv_heads * c.group + query_head) * c.v_dim;
            for (i64 d = 0; d < c.v_dim; d++) {
                if (c.q_type)
                    static_cast<bf16*>(c.out)[to + d] = to_bf16(merged[d] * share);
                else
                    static_cast<float*>(c.out)[to + d] = merged[d] * share;
            }
        });
    }
};

template <typename Work, typename Call>
bool run_all(const Call* calls, i64 count, int threads, Parallel parallel) {
    try {
        const std::vector<Work> works(calls, calls + count);
        i64 tasks = 0;
        for (const Work& work : works) tasks += work.tasks;
        return for_each_task(tasks, threads, parallel, [&](i64 task) {
            size_t at = 0;
            for (; task >= works[at].tasks; at++) task -= works[at].tasks;
            works[at].run(task);
        });
    } catch (const std::bad_alloc&) {
        return false;
    }
}

}  // namespace

bool attend_prefixes(const PrefixCall* calls, i64 count, int threads, Parallel parallel) {
    return run_all<PrefixWork>(calls, count, threads, parallel);
}

bool attend_owns(const OwnCall* calls, i64 count, int threads, Parallel parallel) {
    return run_all<OwnWork>(calls, count, threads, parallel);
}

extern "C" {

int attend_prefix(const PrefixCall* call) {
    return attend_prefixes(call, 1, int(call->threads), call->parallel) ? 0 : 1;
}

int attend_own(const OwnCall* call) { return attend_owns(call, 1, int(call->threads), call->parallel) ? 0 : 1; }

}  // extern "C"
