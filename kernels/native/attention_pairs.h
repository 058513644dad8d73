// Attention over keys and values in bfloat16, where the CPU multiplies these in pairs. Scores and sums are float32.
//
// Keys are used as they are stored. Values are turned once for all rows of a task, so that each dimension's lie one
// behind the other; and the weights of two keys become a pair.

#pragma once

#include <algorithm>

#include "attention_parts.h"
#include "pairs.h"

#if defined(PAIRS)

namespace {

constexpr int PAIR_WIDE = 2;       // vectors of query rows in a full panel
constexpr int PAIR_KEYS = 2048;  // whose values are turned at once; they stay in the second cache
constexpr int PAIR_STEP = 192;   // of a step of the softmax
constexpr float MARGIN = 16;     // in log 2: a score may be so much higher than those before, and the peak holds

// Keys and values that are needed next, fetched while others are computed with. They come from several places in turn:
// memory gives lines of several pages sooner than those of one.
struct Ahead {
    static constexpr i64 PLACES = 4;
    const char *k, *v;
    i64 k_row, v_row, part, left;
    int k_bytes, v_bytes;

    // `count` of them from key `from` on.
    Ahead(const Keys& keys, i64 from, i64 count)
        : k(static_cast<const char*>(keys.k) + 2 * from * keys.k_stride),
          v(static_cast<const char*>(keys.v) + 2 * from * keys.v_stride), k_row(2 * keys.k_stride),
          v_row(2 * keys.v_stride), part((count + PLACES - 1) / PLACES), left(part), k_bytes(2 * keys.dim),
          v_bytes(2 * keys.v_dim) {}

    // Of up to `most` keys from `at` on, or of the next ones where `end` is reached: what is due between `before` and
    // `done` of `all` steps.
    static Ahead of(const Keys& keys, i64 at, i64 end, i64 most, i64 before, i64 done, i64 all) {
        const bool more = at < end || keys.next == nullptr;
        const Keys& coming = more ? keys : *keys.next;
        const i64 from = more ? at : coming.begin, left = (more ? end : coming.end) - from;
        const i64 count = std::max(std::min(most, left), i64(0));
        return Ahead(coming, from + count * before / all, count * done / all - count * before / all);
    }
    // The next one of each place.
    inline void fetch() {
        if (left == 0) return;
        const i64 at = part - left--;
        for (int byte = 0; byte < k_bytes; byte += 64)
            for (i64 place = 0; place < PLACES; place++) fetch_line(k + (place * part + at) * k_row + byte);
        for (int byte = 0; byte < v_bytes; byte += 64)
            for (i64 place = 0; place < PLACES; place++) fetch_line(v + (place * part + at) * v_row + byte);
    }
};

// As `weigh` in floats: scores s [keys][N * 16] -> weights, as pairs of keys. Keys come in multiples of 32. Beside it
// so many `fetches` are made. The peak that is kept lies MARGIN above the highest score so far, so that it seldom
// changes.
template <int N>
inline void weigh_anew(const Tiles& tiles, float* s, int keys, int32_t key0, const int32_t* first, const int32_t* stop,
                       bool masked, float softcap, Ahead& ahead, i64 fetches, float* peak, float* total,
                       uint32_t* pairs, __m512* decay) {
    if (masked || softcap != 0) cap_and_hide<N>(s, keys, key0, first, stop, masked, softcap);
    __m512 shift[N], sum[N];
    for (int n = 0; n < N; n++) {
        const __m512 before = _mm512_loadu_ps(peak + n * LANES);
        __m512 tops[4] = {before, before, before, before};
        for (int key = 0; key < keys; key += 4)  // where one is NaN the second is taken: its weight is NaN below
            for (int i = 0; i < 4; i++)
                tops[i] = _mm512_max_ps(_mm512_loadu_ps(s + ((key + i) * N + n) * LANES), tops[i]);
        __m512 top = _mm512_max_ps(_mm512_max_ps(tops[0], tops[1]), _mm512_max_ps(tops[2], tops[3]));
        const __mmask16 grew = _mm512_cmp_ps_mask(top, before, _CMP_GT_OQ);
        top = _mm512_mask_add_ps(before, grew, _mm512_roundscale_ps(top, 0x02), _mm512_set1_ps(MARGIN));
        const __mmask16 nothing = _mm512_cmp_ps_mask(top, _mm512_set1_ps(-INF), _CMP_EQ_OQ);
        shift[n] = _mm512_mask_mov_ps(top, nothing, _mm512_setzero_ps());
        decay[n] = (__m512)exp2((vf)_mm512_sub_ps(before, shift[n]));  // exactly 1 where nothing changed
        sum[n] = _mm512_setzero_ps();
        _mm512_storeu_ps(peak + n * LANES, top);
    }
    i64 due = 0;
    for (int key = 0; key < keys; key += 2) {
        for (due += 2 * fetches; due >= keys; due -= keys) ahead.fetch();
        if (key % 32 == 0) tiles.stay_awake();
        for (int n = 0; n < N; n++) {
            const __m512 low = exp2_roughly(_mm512_sub_ps(_mm512_loadu_ps(s + (key * N + n) * LANES), shift[n]));
            const __m512 high = exp2_roughly(_mm512_sub_ps(_mm512_loadu_ps(s + ((key + 1) * N + n) * LANES), shift[n]));
            sum[n] = _mm512_add_ps(sum[n], _mm512_add_ps(low, high));
            _mm512_storeu_si512(pairs + (key / 2 * N + n) * LANES, paired(low, high));
        }
    }
    for (int n = 0; n < N; n++) {
        const __m512 so_far = _mm512_loadu_ps(total + n * LANES);
        _mm512_storeu_ps(total + n * LANES, _mm512_fmadd_ps(so_far, decay[n], sum[n]));
    }
}

// Whether there are peaks, and small enough for what `weigh_quickly` does.
template <int N>
inline bool holds(const float* peak) {
    bool all = true;
    for (int n = 0; n < N; n++)
        all &= _mm512_cmp_ps_mask(_mm512_abs_ps(_mm512_loadu_ps(peak + n * LANES)), _mm512_set1_ps(1 << 20),
                                  _CMP_NLE_UQ) == 0;
    return all;
}

// The same behind earlier keys, as long as their peaks hold; false: they do not, or a score is no number, and nothing
// but `pairs` was changed.
template <int N>
inline bool weigh_quickly(const Tiles& tiles, const float* s, int keys, Ahead& ahead, i64 fetches, const float* peak,
                          float* total, uint32_t* pairs) {
    const Powers powers;
    __m512 offset[N], sum[N];
    __m512i seen[N];
    for (int n = 0; n < N; n++) {
        offset[n] = _mm512_sub_ps(_mm512_set1_ps(Powers::ONE), _mm512_loadu_ps(peak + n * LANES));
        sum[n] = _mm512_setzero_ps();
        seen[n] = _mm512_setzero_si512();
    }
    i64 due = 0;
    for (int key = 0; key < keys; key += 2) {
        for (due += 2 * fetches; due >= keys; due -= keys) ahead.fetch();
        if (key % 32 == 0) tiles.stay_awake();
        for (int n = 0; n < N; n++) {
            const __m512i low = powers.steps(_mm512_loadu_ps(s + (key * N + n) * LANES), offset[n]);
            const __m512i high = powers.steps(_mm512_loadu_ps(s + ((key + 1) * N + n) * LANES), offset[n]);
            seen[n] = _mm512_ternarylogic_epi32(seen[n], low, high, 0xfe);
            const __m512i pair = powers.paired(low, high);
            sum[n] = _mm512_dpbf16_ps(sum[n], (__m512bh)_mm512_set1_epi32(0x3f803f80), (__m512bh)pair);
            _mm512_storeu_si512(pairs + (key / 2 * N + n) * LANES, pair);
        }
    }
    for (int n = 0; n < N; n++)
        if (!powers.hold(seen[n])) return false;
    for (int n = 0; n < N; n++)
        _mm512_storeu_ps(total + n * LANES, _mm512_add_ps(_mm512_loadu_ps(total + n * LANES), sum[n]));
    return true;
}

// Quickly where that can be done, else anew: `again` computes the scores once more if they are gone by then. Whether what
// was summed up before has to be multiplied by `decay`.
template <int N, typename Again>
inline bool weigh_pairs(const Tiles& tiles, float* s, int keys, int32_t key0, const int32_t* first,
                        const int32_t* stop, bool masked, float softcap, Ahead& ahead, i64 fetches, float* peak,
                        float* total, uint32_t* pairs, __m512* decay, const Again& again) {
    const bool may_hold = !masked && softcap == 0 && holds<N>(peak);
    if (may_hold && weigh_quickly<N>(tiles, s, keys, ahead, fetches, peak, total, pairs)) return false;
    if (may_hold) again();
    weigh_anew<N>(tiles, s, keys, key0, first, stop, masked, softcap, ahead, fetches, peak, total, pairs, decay);
    bool any = false;
    for (int n = 0; n < N; n++) any |= _mm512_cmp_ps_mask(decay[n], _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) != 0;
    return any;
}

// [keys][v_dim] -> [v_dim / 16][PAIR_KEYS / 32][16 dimensions][32 keys], zeros behind the last key.
inline void turn_values(const bf16* v, i64 stride, int keys, int v_dim, bf16* to) {
    for (int key = 0; key < (keys + 31) / 32 * 32; key += 32)
        for (int d = 0; d < v_dim; d += 16) {
            __m512i pairs[16];
            for (int i = 0; i < 16; i++) {
                const int even = key + 2 * i, odd = even + 1;
                __m256i low = _mm256_setzero_si256(), high = low;
                if (even < keys) low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(v + even * stride + d));
                if (odd < keys) high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(v + odd * stride + d));
                pairs[i] = _mm512_or_si512(_mm512_cvtepu16_epi32(low),
                                           _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
            }
            transpose(pairs);
            bf16* tile = to + d * PAIR_KEYS + key * 16;
            for (int i = 0; i < 16; i++) _mm512_storeu_si512(tile + i * 32, pairs[i]);
        }
}

// A copy of keys [from, from + count) with zeros up to `whole`: what lies behind the last may be no number, or not
// ours.
inline const bf16* whole_keys(const Keys& keys, i64 from, int count, int whole, bf16* copy) {
    for (int key = 0; key < count; key++)
        std::memcpy(copy + i64(key) * keys.dim, static_cast<const bf16*>(keys.k) + (from + key) * keys.k_stride,
                    size_t(keys.dim) * 2);
    std::memset(static_cast<void*>(copy + i64(count) * keys.dim), 0, size_t(whole - count) * keys.dim * 2);
    return copy;
}

struct PairBlock {
    const bf16* k;
    i64 k_stride;
    const bf16* v;  // turned
    i64 begin;
};

template <int N>
void attend_pair_block(const Tiles& tiles, const Panel& panel, const PairBlock& block, i64 begin, i64 end, int dim,
                       int v_dim, float softcap, Ahead& ahead, const uint32_t* q, const int32_t* first,
                       const int32_t* stop, float* s, const Found& found) {
    const int keys = int(end - begin);
    uint32_t* const pairs = reinterpret_cast<uint32_t*>(s);  // in place: a pair is half as large as its two scores
    const bf16* k = block.k + (begin - block.begin) * block.k_stride;
    auto scores = [&] { multiply_pairs<N>(tiles, Side(k, block.k_stride), keys, q, dim, s, false); };
    scores();
    __m512 decay[N];
    const bool masked = begin < panel.full_low || end > panel.full_high;
    float* out = found.out + panel.row * found.out_dim;
    if (weigh_pairs<N>(tiles, s, keys, int32_t(begin), first + panel.row, stop + panel.row, masked, softcap, ahead,
                       ahead.left, found.peak + panel.row, found.total + panel.row, pairs, decay, scores))
        for (int d = 0; d < v_dim; d++)
            for (int n = 0; n < N; n++) {
                float* at = out + (d * N + n) * LANES;
                _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), decay[n]));
            }
    const Side v(block.v + (begin - block.begin) * 16, 32, 32 * 16, PAIR_KEYS * 16);
    multiply_pairs<N>(tiles, v, v_dim, pairs, keys, out, true);
}

// Sums [v_dim][width * 16] of panels -> [rows][v_dim].
inline void as_rows(const std::vector<Panel>& panels, const float* sums, int v_dim, float* out) {
    for (const Panel& panel : panels)
        for (int n = 0; n < panel.width; n++)
            for (int d = 0; d < v_dim; d += 16) {
                __m512i tile[16];
                for (int i = 0; i < 16; i++)
                    tile[i] = _mm512_loadu_si512(sums + panel.row * v_dim + ((d + i) * panel.width + n) * LANES);
                transpose(tile);
                float* to = out + (panel.row + n * LANES) * v_dim + d;
                for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * v_dim, tile[i]);
            }
}

// Multiplied by `scale`, as [panel][dim / 2][lanes] pairs.
inline void pack_queries(const Rows& rows, const std::vector<Panel>& panels, int dim, float scale, uint32_t* q) {
    const bf16* narrow = static_cast<const bf16*>(rows.q);
    const float* wide = static_cast<const float*>(rows.q);
    for (const Panel& panel : panels)
        for (int n = 0; n < panel.width; n++) {
            auto at = [&](i64 lane) -> i64 {
                const i64 row = panel.row + n * LANES + lane;
                if (row >= rows.count) return -1;
                const i64 number = rows.first_row + row;
                return number / rows.group * rows.token_stride + number % rows.group * rows.member_stride;
            };
            uint32_t* to = q + panel.row * dim / 2 + n * LANES;
            const i64 lanes = panel.width * LANES;
            if (rows.q_is_bf16)
                pack_pairs<bf16>([&](int i) { return at(i) < 0 ? nullptr : narrow + at(i); }, dim, scale, lanes, to);
            else
                pack_pairs<float>([&](int i) { return at(i) < 0 ? nullptr : wide + at(i); }, dim, scale, lanes, to);
        }
}

inline bool takes_pairs(const Keys& keys) { return keys.dim % PAIR_DEPTH == 0 && keys.v_dim % PAIR_ROWS == 0; }

inline Found attend_pairs(const Rows& rows, const Keys& keys, const Softmax& softmax) {
    thread_local std::vector<Panel> panels;
    const i64 padded = make_panels(rows.count, PAIR_WIDE, panels);
    const i64 q_size = padded * keys.dim / 2, out_size = padded * keys.v_dim, v_size = PAIR_KEYS * keys.v_dim / 2;
    const i64 k_size = 32 * keys.dim / 2, s_size = PAIR_STEP * PAIR_WIDE * LANES;
    attention_scratch.reserve(size_t(q_size + 2 * out_size + v_size + k_size + s_size + PerRow::SIZE * padded) * 4);
    float* out = reinterpret_cast<float*>(attention_scratch.memory);
    float* sums = out + out_size;
    float* s = sums + out_size;
    uint32_t* q = reinterpret_cast<uint32_t*>(s + s_size);
    bf16* v_turned = reinterpret_cast<bf16*>(q + q_size);
    bf16* k_copy = v_turned + 2 * v_size;
    const PerRow kept(k_copy + 2 * k_size, padded);
    const Range all = see(rows, keys, panels, kept);
    std::memset(sums, 0, size_t(out_size) * 4);

    pack_queries(rows, panels, keys.dim, score_scale(softmax), q);

    const Tiles tiles;
    const Found found = {sums, kept.peak, kept.total, keys.v_dim};
    const bf16* k = static_cast<const bf16*>(keys.k);
    const bf16* v = static_cast<const bf16*>(keys.v);
    for (i64 from = all.low; from < all.high; from += PAIR_KEYS) {
        const i64 to = from + PAIR_KEYS < all.high ? from + PAIR_KEYS : all.high;
        turn_values(v + from * keys.v_stride, keys.v_stride, int(to - from), keys.v_dim, v_turned);
        const i64 full = to - (to - from) % 32, num_panels = i64(panels.size());
        const i64 all_steps = num_panels * ((to - from + PAIR_STEP - 1) / PAIR_STEP);
        const PairBlock most = {k + from * keys.k_stride, keys.k_stride, v_turned, from};
        const PairBlock rest = {k_copy, keys.dim, v_turned + (full - from) * 16, full};
        if (full < to) whole_keys(keys, full, int(to - full), 32, k_copy);
        i64 steps = 0;
        for (const Panel& panel : panels) {
            if (panel.high <= from || panel.low >= to) continue;
            const i64 low = panel.low > from ? panel.low - (panel.low - from) % 32 : from;
            const i64 high = panel.high < to ? panel.high : to;
            auto run = panel.width == 2 ? attend_pair_block<2> : attend_pair_block<1>;
            const i64 behind = low + (high - low + 31) / 32 * 32;
            for (i64 begin = low, end; begin < high; begin = end) {
                const PairBlock& block = begin < full ? most : rest;
                const i64 last = begin < full ? full : behind;
                end = begin + PAIR_STEP < last ? begin + PAIR_STEP : last;
                if (end > behind) end = behind;
                Ahead ahead = Ahead::of(keys, to, all.high, PAIR_KEYS, steps, steps + 1, all_steps);
                steps++;
                run(tiles, panel, block, begin, end, keys.dim, keys.v_dim, softmax.softcap, ahead,
                    q + panel.row * keys.dim / 2, kept.first, kept.stop, s, found);
            }
        }
    }
    as_rows(panels, sums, keys.v_dim, out);
    return {out, kept.peak, kept.total, keys.v_dim};
}

}  // namespace

#endif
