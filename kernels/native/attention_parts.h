// What all ways of computing attention share: which rows see which keys, and the running softmax over a block.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "bfloat16.h"
#include "exp2.h"
#include "lanes.h"
#include "scratch.h"

namespace {

typedef int32_t vi_unaligned __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr double LN2 = 0.6931471805599453;

inline vi load(const int32_t* p) { return *reinterpret_cast<const vi_unaligned*>(p); }

// softcap * tanh(x / softcap) in log 2, of a score that came multiplied by 2 / softcap.
inline vf capped(vf x, float softcap) {
    const float cap = float(softcap * LOG2E);
    return cap - 2.0f * cap / (1.0f + exp2(at_most(x, 126.0f)));
}

thread_local Scratch attention_scratch;

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
    const Keys* next = nullptr;  // what this thread will probably attend to next
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

// What queries are multiplied by.
inline float score_scale(const Softmax& softmax) {
    return float(softmax.scale * LOG2E * (softmax.softcap != 0 ? 2.0 / softmax.softcap : 1.0));
}

struct Panel {
    int width;  // in vectors
    i64 row;
    int32_t low, high, full_low, full_high;  // keys that some row sees; keys that all rows see
};

// Cuts rows into panels of up to `wide` vectors; how many rows they have with those that fill the last.
inline i64 make_panels(i64 count, int wide, std::vector<Panel>& panels) {
    panels.clear();
    i64 padded = 0;
    while (padded < count) {
        const i64 left = count - padded;
        const int width = left >= wide * LANES ? wide : int((left + LANES - 1) / LANES);
        panels.push_back({width, padded, 0, 0, 0, 0});
        padded += width * LANES;
    }
    return padded;
}

// What is kept of each row of panels: the highest score so far and the sum of its weights, and the keys that it sees.
struct PerRow {
    static constexpr i64 SIZE = 4;  // numbers of 32 bits a row
    float *peak, *total;
    int32_t *first, *stop;
    PerRow(void* memory, i64 rows)
        : peak(static_cast<float*>(memory)), total(peak + rows), first(reinterpret_cast<int32_t*>(total + rows)),
          stop(first + rows) {}
};

// Notes what each row and panel sees, and begins the sums; the keys that any row sees.
inline Range see(const Rows& rows, const Keys& keys, std::vector<Panel>& panels, const PerRow& kept) {
    Range all = {keys.end, keys.begin};
    for (Panel& panel : panels) {
        panel.low = panel.full_high = std::numeric_limits<int32_t>::max();
        panel.high = panel.full_low = 0;
        for (int lane = 0; lane < panel.width * LANES; lane++) {
            const i64 row = panel.row + lane;
            const Range seen = range(rows, keys, row < rows.count ? row : rows.count - 1);
            const int32_t first = kept.first[row] = int32_t(seen.low);
            const int32_t stop = kept.stop[row] = int32_t(seen.high);
            panel.low = first < panel.low ? first : panel.low;
            panel.full_low = first > panel.full_low ? first : panel.full_low;
            panel.high = stop > panel.high ? stop : panel.high;
            panel.full_high = stop < panel.full_high ? stop : panel.full_high;
            kept.peak[row] = -INF;
            kept.total[row] = 0.0f;
        }
        all.low = panel.low < all.low ? panel.low : all.low;
        all.high = panel.high > all.high ? panel.high : all.high;
    }
    return all;
}

// What `attend` leaves: [rows][out_dim], not yet divided by `total`; `peak` in log 2. While a way in panels is at work,
// `out` is [v_dim][panel width] for each panel.
struct Found {
    float *out, *peak, *total;
    i64 out_dim;
};

// Caps scores s [keys][N * LANES], and hides those of keys that their rows do not see.
template <int N>
inline void cap_and_hide(float* s, int keys, int32_t key0, const int32_t* first, const int32_t* stop, bool masked,
                         float softcap) {
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

// Scores -> weights of one block, in place; `decay` is what the sums of the earlier blocks have to be multiplied by.
template <int N>
inline void weigh(float* s, int keys, int32_t key0, const int32_t* first, const int32_t* stop, bool masked,
                  float softcap, float* peak, float* total, vf* decay) {
    vf top[N], shift[N], sum[N];
    for (int n = 0; n < N; n++) top[n] = load(peak + n * LANES);
    if (masked || softcap != 0) cap_and_hide<N>(s, keys, key0, first, stop, masked, softcap);
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

}  // namespace
