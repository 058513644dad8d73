// Products of bfloat16 numbers, summed in float32, where the CPU multiplies them in pairs: by AMX tiles or AVX512-BF16.
//
// One side, A, is used as it is stored: rows of numbers that lie one behind the other, or in blocks of PAIR_DEPTH. The
// other, B, is packed: the rows of B lie along the vector lanes, N vectors side by side, and each lane holds a pair of
// neighbouring numbers.

#pragma once

#include <cmath>

#include "bfloat16.h"
#include "lanes.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VBMI__) && LANES == 16
#define PAIRS 1
#include <immintrin.h>
#if defined(__AMX_BF16__) && defined(__linux__) && !defined(NO_TILES)
#define TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int PAIR_ROWS = 16;   // A comes in multiples of these rows,
constexpr int PAIR_DEPTH = 32;  // and of these numbers

// Where the numbers of A are: `row` lies between rows, `step` between blocks of PAIR_DEPTH numbers of a row, and
// `tile` between blocks of PAIR_ROWS rows.
struct Side {
    const bf16* first;
    i64 row, step, tile;
    Side(const bf16* a, i64 stride) : first(a), row(stride), step(PAIR_DEPTH), tile(PAIR_ROWS * stride) {}
    Side(const bf16* a, i64 row_, i64 step_, i64 tile_) : first(a), row(row_), step(step_), tile(tile_) {}
};

// The side of a product that is read once, or again only when the first cache has lost it: it goes past this cache, so
// that the other side stays there.
enum class Once { A, B };

// What a product's successor will read, in two places: `lines` of each are fetched for each PAIR_DEPTH numbers.
struct Fetch {
    const void *first = nullptr, *second = nullptr;
    int lines = 0;
    inline void line(i64 number) const {
        fetch_line(static_cast<const char*>(first) + number * 64);
        fetch_line(static_cast<const char*>(second) + number * 64);
    }
};

#if defined(TILES)
// Whether the kernel lets this process use tiles: it is asked once, since a thread's state becomes larger with them.
inline bool tiles_allowed() {
    static const bool allowed = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
    return allowed;
}

struct alignas(64) Shape {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    constexpr Shape() = default;
};

// While it lives, this thread's tiles are 16 rows of 64 bytes. Others that use tiles set them up for themselves.
struct Tiles {
    bool on;
    Tiles() : on(tiles_allowed()) {
        if (!on) return;
        static const Shape shape;  // in memory: compilers believe that only its first bytes are read
        _tile_loadconfig(&shape);
    }
    ~Tiles() {
        if (on) _tile_release();
    }
    // A product whose result nobody needs; tile 0 is lost. Without any for 270 ns the CPU puts the unit to sleep, and
    // the next one takes as long again (measured on an Emerald Rapids).
    inline void stay_awake() const {
        if (on) _tile_dpbf16ps(0, 1, 2);
    }
};

template <Once ONCE, int M, int N>  // tiles of sums: M x N
inline void multiply_tiles(const Side& a, i64 tile, const uint32_t* b, i64 depth, float* c, bool add,
                           const Fetch& fetch) {
    constexpr int ROW = N * 64;  // bytes of a packed row of B, and of a row of C
    if (add) {
        _tile_loadd(0, c, ROW);
        if (N > 1) _tile_loadd(1, c + 16, ROW);
        if (M > 1) _tile_loadd(2, c + 16 * N * 16, ROW);
        if (M > 1 && N > 1) _tile_loadd(3, c + 16 * N * 16 + 16, ROW);
    } else {
        _tile_zero(0);
        if (N > 1) _tile_zero(1);
        if (M > 1) _tile_zero(2);
        if (M > 1 && N > 1) _tile_zero(3);
    }
    const bf16* left = a.first + tile * a.tile;
    const uint32_t* pairs = b;
    i64 line = 0;
    for (i64 k = 0; k < depth; k += PAIR_DEPTH, left += a.step, pairs += PAIR_DEPTH / 2 * N * 16) {
        for (int i = 0; i < fetch.lines; i++) fetch.line(line++);
        if (ONCE == Once::A) {
            _tile_stream_loadd(4, left, a.row * 2);
            if (M > 1) _tile_stream_loadd(5, left + a.tile, a.row * 2);
            _tile_loadd(6, pairs, ROW);
            if (N > 1) _tile_loadd(7, pairs + 16, ROW);
        } else {
            _tile_loadd(4, left, a.row * 2);
            if (M > 1) _tile_loadd(5, left + a.tile, a.row * 2);
            _tile_stream_loadd(6, pairs, ROW);
            if (N > 1) _tile_stream_loadd(7, pairs + 16, ROW);
        }
        _tile_dpbf16ps(0, 4, 6);
        if (N > 1) _tile_dpbf16ps(1, 4, 7);
        if (M > 1) _tile_dpbf16ps(2, 5, 6);
        if (M > 1 && N > 1) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, ROW);
    if (N > 1) _tile_stored(1, c + 16, ROW);
    if (M > 1) _tile_stored(2, c + 16 * N * 16, ROW);
    if (M > 1 && N > 1) _tile_stored(3, c + 16 * N * 16 + 16, ROW);
}
// The same for A of any number of 16 rows and B of depth 64, which stays in tiles.
template <int N, typename Beside>
inline void multiply_by_kept_tiles(const Side& a, i64 rows, const uint32_t* b, float* c, const Beside& beside) {
    constexpr int ROW = N * 64;
    const bf16* left = a.first;
    _tile_loadd(4, b, ROW);
    _tile_loadd(5, b + 16 * N * 16, ROW);
    if (N > 1) _tile_loadd(6, b + 16, ROW);
    if (N > 1) _tile_loadd(7, b + 16 * N * 16 + 16, ROW);
    for (i64 row = 0; row < rows; row += 16, left += a.tile, c += 16 * N * 16) {
        beside();
        _tile_zero(0);
        if (N > 1) _tile_zero(1);
        _tile_stream_loadd(2, left, a.row * 2);
        _tile_stream_loadd(3, left + a.step, a.row * 2);
        _tile_dpbf16ps(0, 2, 4);
        if (N > 1) _tile_dpbf16ps(1, 2, 6);
        _tile_dpbf16ps(0, 3, 5);
        if (N > 1) _tile_dpbf16ps(1, 3, 7);
        _tile_stored(0, c, ROW);
        if (N > 1) _tile_stored(1, c + 16, ROW);
    }
}
#else
struct Tiles {
    static constexpr bool on = false;
    void stay_awake() const {}
};
#endif

template <int N>
inline void multiply_vectors(const Side& a, i64 first, const uint32_t* b, i64 depth, float* c, bool add) {
    constexpr int M = 8;
    __m512 sum[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (int n = 0; n < N; n++) sum[m][n] = add ? _mm512_loadu_ps(c + (m * N + n) * 16) : _mm512_setzero_ps();
    const bf16* block = a.first + first / PAIR_ROWS * a.tile + first % PAIR_ROWS * a.row;
    for (i64 k = 0; k < depth; k += PAIR_DEPTH, block += a.step)
        for (i64 pair = 0; pair < PAIR_DEPTH / 2; pair++, b += N * 16) {
            __m512bh some[N];
#pragma GCC unroll 2
            for (int n = 0; n < N; n++) some[n] = (__m512bh)_mm512_loadu_si512(b + n * 16);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                int32_t two;
                std::memcpy(&two, block + m * a.row + 2 * pair, 4);
                const __m512bh same = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 2
                for (int n = 0; n < N; n++) sum[m][n] = _mm512_dpbf16_ps(sum[m][n], same, some[n]);
            }
        }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (int n = 0; n < N; n++) _mm512_storeu_ps(c + (m * N + n) * 16, sum[m][n]);
}

struct Nothing {
    void operator()() const {}
};

// c [rows][N * 16] = a [rows][depth] times b [depth / 2][N * 16], plus c where `add`. `beside` is called for each 16
// rows.
template <int N, Once ONCE = Once::A, typename Beside = Nothing>
inline void multiply_pairs(const Tiles& tiles, const Side& a, i64 rows, const uint32_t* b, i64 depth, float* c,
                           bool add, const Fetch& fetch = {}, const Beside& beside = {}) {
    i64 row = 0;
#if defined(TILES)
    if (tiles.on && depth == 2 * PAIR_DEPTH && rows > 32 && !add) {
        multiply_by_kept_tiles<N>(a, rows, b, c, beside);
        row = rows;
    } else if (tiles.on) {
        for (; row + 32 <= rows; row += 32) {
            beside(), beside();
            multiply_tiles<ONCE, 2, N>(a, row / 16, b, depth, c + row * N * 16, add, fetch);
        }
        for (; row < rows; row += 16) {
            beside();
            multiply_tiles<ONCE, 1, N>(a, row / 16, b, depth, c + row * N * 16, add, fetch);
        }
    }
#endif
    (void)tiles, (void)fetch;
    for (; row < rows; row += 8) {
        if (row % 16 == 0) beside();
        multiply_vectors<N>(a, row, b, depth, c + row * N * 16, add);
    }
}

// Rows become columns: 16 vectors of 16 numbers of 32 bits.
inline void transpose(__m512i* r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

// Of 32 numbers: as 16 pairs, rounded.
inline __m512i as_pairs(const float* x, float scale) {
    const __m512 by = _mm512_set1_ps(scale);
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(_mm512_loadu_ps(x + 16), by),
                                        _mm512_mul_ps(_mm512_loadu_ps(x), by));
}
inline __m512i as_pairs(const bf16* x, float scale) {
    const __m512 by = _mm512_set1_ps(scale);
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps((__m512)load(x + 16), by),
                                        _mm512_mul_ps((__m512)load(x), by));
}

// Packs 16 rows: row(i) is where the numbers of the i-th lie, or null for one of zeros. `to` is the first of its N * 16
// lanes of the first pair.
template <typename T, typename F>
inline void pack_pairs(const F& row, i64 depth, float scale, i64 lanes, uint32_t* to) {
    const T* at[16];
    for (int i = 0; i < 16; i++) at[i] = row(i);
    for (i64 k = 0; k < depth; k += PAIR_DEPTH) {
        __m512i pairs[16];
        for (int i = 0; i < 16; i++) pairs[i] = at[i] ? as_pairs(at[i] + k, scale) : _mm512_setzero_si512();
        transpose(pairs);
        for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + (k / 2 + i) * lanes, pairs[i]);
    }
}

// 2^x with a relative error below 8e-5: a bfloat16 keeps 4e-3.
inline __m512 exp2_roughly(__m512 x) {
    const __m512 f = _mm512_reduce_ps(x, 0x01);  // x less the next whole number below
    __m512 p = _mm512_set1_ps(0.0780245195f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.226067178f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.695833522f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.999925221f));
    return _mm512_scalef_ps(p, x);
}

// Two rows as pairs, rounded.
inline __m512i paired(__m512 low, __m512 high) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                           5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

// Powers of two as bfloat16, straight from numbers: added to a number so large that its last bit is worth 2^-7, x leaves
// behind its whole part and the first seven bits of its fraction f, which are the bits of 2^x but for f + 1 - 2^f.
struct Powers {
    static constexpr float ZERO = 98304;        // 1.5 * 2^16: what comes out as 0, or 2^-127
    static constexpr float ONE = ZERO + 127.0f;  // an exponent's bias more: what comes out as 1
    __m512i less, more;                         // 128 * (f + 1 - 2^f), for each f of seven bits

    Powers() {
        static const Bytes of;
        less = _mm512_load_si512(of.bytes), more = _mm512_load_si512(of.bytes + 64);
    }
    // The bits of x + offset, of which the lower half counts.
    static __m512i steps(__m512 x, __m512 offset) { return _mm512_castps_si512(_mm512_add_ps(x, offset)); }
    // Of two rows, as pairs.
    __m512i paired(__m512i low, __m512i high) const {
        const __m512i both = _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_slli_epi32(high, 16));
        return _mm512_sub_epi16(both, _mm512_maskz_permutex2var_epi8(0x5555555555555555, less, both, more));
    }
    // Whether all steps whose bits were joined in `seen` are of numbers from 2^-127 to below 2.
    static bool hold(__m512i seen) {
        const __m512i other = _mm512_xor_si512(seen, _mm512_castps_si512(_mm512_set1_ps(ZERO)));
        return _mm512_test_epi32_mask(other, _mm512_set1_epi32(int(0xffffc000))) == 0;
    }

    struct Bytes {
        alignas(64) uint8_t bytes[128];
        Bytes() {
            for (int f = 0; f < 128; f++) bytes[f] = uint8_t(std::lround(f + 128 - 128 * std::exp2(f / 128.0)));
        }
    };
};

}  // namespace

#endif
