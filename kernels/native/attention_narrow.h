// Attention of 5 to 16 rows over keys and values in bfloat16: those of a few questions of one document. Here turning
// the values would cost more than all products. So the weights are turned instead, which are fewer, and values are
// packed as they come: neighbouring keys side by side.

#pragma once

#include "attention_pairs.h"

#if defined(PAIRS)

namespace {

constexpr int NARROW_KEYS = 128;  // of a block

// 32 keys x 32 dimensions -> [16 pairs of keys][32 dimensions], in the order in which `dimensions` finds them again.
inline void pair_keys(const bf16* v, i64 stride, int keys, uint32_t* to, Ahead& ahead) {
    for (int pair = 0; pair < 16; pair++) {
        if (pair % 8 == 0) ahead.fetch();
        const __m512i nothing = _mm512_setzero_si512();
        const __m512i even = 2 * pair < keys ? _mm512_loadu_si512(v + 2 * pair * stride) : nothing;
        const __m512i odd = 2 * pair + 1 < keys ? _mm512_loadu_si512(v + (2 * pair + 1) * stride) : nothing;
        _mm512_storeu_si512(to + pair * 32, _mm512_unpacklo_epi16(even, odd));
        _mm512_storeu_si512(to + pair * 32 + 16, _mm512_unpackhi_epi16(even, odd));
    }
}

inline void dimensions(const float* sums, float* out) {
    const __m512 low = _mm512_loadu_ps(sums), high = _mm512_loadu_ps(sums + 16);
    const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    _mm512_storeu_ps(out, _mm512_permutex2var_ps(low, first, high));
    _mm512_storeu_ps(out + 16, _mm512_permutex2var_ps(low, second, high));
}

inline bool takes_narrow(const Rows& rows, const Keys& keys) {
    return rows.count <= LANES && keys.dim % PAIR_DEPTH == 0 && keys.v_dim % PAIR_DEPTH == 0;
}

inline Found attend_narrow(const Rows& rows, const Keys& keys, const Softmax& softmax) {
    thread_local std::vector<Panel> panels;
    make_panels(rows.count, 1, panels);
    const Panel& panel = panels[0];
    const i64 q_size = LANES * keys.dim / 2, k_size = NARROW_KEYS * keys.dim / 2, s_size = NARROW_KEYS * LANES;
    const i64 out_size = LANES * keys.v_dim, v_size = NARROW_KEYS * keys.v_dim / 2;
    const i64 row_size = (PerRow::SIZE + 1) * LANES;
    attention_scratch.reserve(size_t(q_size + k_size + 2 * s_size + 2 * out_size + v_size + row_size) * 4);
    float* sums = reinterpret_cast<float*>(attention_scratch.memory);  // [v_dim / 32][16 rows][32]
    float* out = sums + out_size;
    float* s = out + out_size;
    uint32_t* pairs = reinterpret_cast<uint32_t*>(s + s_size);
    uint32_t* turned = pairs + s_size / 2;  // [NARROW_KEYS / 32][16 rows][16 pairs]
    uint32_t* q = turned + s_size / 2;
    uint32_t* v_pairs = q + q_size;  // [v_dim / 32][NARROW_KEYS / 2][32]
    bf16* k_copy = reinterpret_cast<bf16*>(v_pairs + v_size);
    float* decays = reinterpret_cast<float*>(k_copy + 2 * k_size);
    const PerRow kept(decays + LANES, LANES);
    const Range all = see(rows, keys, panels, kept);
    std::memset(sums, 0, size_t(out_size) * 4);
    pack_queries(rows, panels, keys.dim, score_scale(softmax), q);

    const Tiles tiles;
    const bf16* k = static_cast<const bf16*>(keys.k);
    const bf16* v = static_cast<const bf16*>(keys.v);
    for (i64 from = all.low; from < all.high; from += NARROW_KEYS) {
        const i64 left = all.high - from, count = left < NARROW_KEYS ? left : NARROW_KEYS;
        const i64 whole = (count + 31) / 32 * 32;
        const Side block = whole == count ? Side(k + from * keys.k_stride, keys.k_stride)
                                          : Side(whole_keys(keys, from, int(count), int(whole), k_copy), keys.dim);
        // A quarter is fetched beside the scores, a quarter beside the softmax, the rest while values are packed.
        Ahead ahead = Ahead::of(keys, from + NARROW_KEYS, all.high, NARROW_KEYS, 0, 1, 1);
        multiply_pairs<1>(tiles, block, whole, q, keys.dim, s, false, {}, [&] { ahead.fetch(); });
        __m512 decay;
        const bool masked = from < panel.full_low || from + whole > panel.full_high;
        const auto again = [] {};  // here the pairs do not take the place of their scores
        if (weigh_pairs<1>(tiles, s, int(whole), int32_t(from), kept.first, kept.stop, masked, softmax.softcap, ahead,
                           NARROW_KEYS / 16, kept.peak, kept.total, pairs, &decay, again)) {
            _mm512_storeu_ps(decays, decay);
            for (i64 at = 0; at < out_size; at += 16) {
                const __m512 by = _mm512_set1_ps(decays[at / 32 % LANES]);
                _mm512_storeu_ps(sums + at, _mm512_mul_ps(_mm512_loadu_ps(sums + at), by));
            }
        }
        for (i64 key = 0; key < whole; key += 32) {
            tiles.stay_awake();
            __m512i tile[16];
            for (int i = 0; i < 16; i++) tile[i] = _mm512_loadu_si512(pairs + (key / 2 + i) * LANES);
            transpose(tile);
            for (int i = 0; i < 16; i++) _mm512_storeu_si512(turned + key * LANES / 2 + i * LANES, tile[i]);
            for (int d = 0; d < keys.v_dim; d += 32)
                pair_keys(v + (from + key) * keys.v_stride + d, keys.v_stride, int(count - key),
                          v_pairs + (d * NARROW_KEYS / 32 + key) * LANES, ahead);
        }
        const Side weights(reinterpret_cast<const bf16*>(turned), 32, 16 * 32, 0);
        for (int d = 0; d < keys.v_dim; d += 32)
            multiply_pairs<2, Once::B>(tiles, weights, LANES, v_pairs + d * NARROW_KEYS / 32 * LANES, whole,
                                       sums + d * LANES, true);
    }
    for (int d = 0; d < keys.v_dim / 32; d++)
        for (int row = 0; row < rows.count; row++)
            dimensions(sums + (d * LANES + row) * 32, out + row * keys.v_dim + d * 32);
    return {out, kept.peak, kept.total, keys.v_dim};
}

}  // namespace

#endif
