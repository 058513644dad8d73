// A linear layer for the rows of a decode step: out[m][n] = sum over k of x[m][k] * w[n][k], plus a bias.
//
// The weights are read as they are stored. A few rows: by dot products along k, in tiles of TILE rows of weights against
// two or three rows of x. More rows: x is transposed once into panels of PANEL rows, which lie along the lanes, and each
// weight is broadcast; so no sum has to be taken across lanes, and the weights need no copy in another order, which for
// few rows costs general matrix products more than the product.

#include "linear.h"

#include "linear_pairs.h"
#include "scratch.h"

namespace {

constexpr int TILE = 4;            // rows of weights at once, by dot products
constexpr int WIDE = 3;            // rows of x at once: TILE * WIDE sums stay in registers
constexpr i64 TILES_PER_TASK = 8;  // small enough to share out evenly

inline void put(const Linear& layer, i64 n, float total, float* out) {
    if (layer.bias) total += layer.bias[n];
    *out = layer.add ? *out + total : total;
}

// The products of `tile` rows of weights, from row `first` on, with M rows of x.
template <int M>
void multiply(const float* x, i64 x_row, i64 in, const Linear& layer, i64 first, int tile, float* out) {
    const float* w = static_cast<const float*>(layer.w) + first * in;
    const float* row[TILE];
    for (int n = 0; n < TILE; n++) row[n] = w + (n < tile ? n : 0) * in;
    vf sums[TILE][M] = {};
    i64 k = 0;
    for (; k + LANES <= in; k += LANES) {
        vf some[M];
        for (int m = 0; m < M; m++) {
            some[m] = load(x + m * x_row + k);
            HOLD(some[m]);
        }
        for (int n = 0; n < TILE; n++) {
            vf weights = load(row[n] + k);
            HOLD(weights);
            for (int m = 0; m < M; m++) sums[n][m] += weights * some[m];
        }
    }
    for (int n = 0; n < tile; n++)
        for (int m = 0; m < M; m++) {
            float total = sum(sums[n][m]);
            for (i64 rest = k; rest < in; rest++) total += row[n][rest] * x[m * x_row + rest];
            put(layer, first + n, total, out + m * layer.out_features + first + n);
        }
}

constexpr int PANEL = 2 * LANES;           // rows of x side by side
constexpr int OUTS = (REGISTERS - 4) / 2;  // rows of weights at once: twice as many sums stay in registers
constexpr i64 OUTS_PER_TASK = 8 * OUTS;
constexpr i64 DEPTH = 512;  // of a block along k: a panel's part of it stays in the second cache, beside the weights'
constexpr i64 PANELS_PER_TASK = 128 / PANEL;
constexpr double FULL_ENOUGH = 0.86;  // panels are by so much faster than dot products, where every row of theirs counts

thread_local Scratch packed;

// Adds to sums[o][r] the products of OUTS rows of weights with a panel of x, over `depth` numbers.
void multiply_panel(const float* panel, const float* const* w, i64 depth, vf sums[OUTS][2]) {
    vf held[OUTS][2];
    for (int o = 0; o < OUTS; o++)
        for (int half = 0; half < 2; half++) held[o][half] = sums[o][half];
    for (i64 k = 0; k < depth; k++) {
        vf left = load(panel + k * PANEL), right = load(panel + k * PANEL + LANES);
        HOLD(left);
        HOLD(right);
        for (int o = 0; o < OUTS; o++) {
            held[o][0] += left * w[o][k];
            held[o][1] += right * w[o][k];
        }
    }
    for (int o = 0; o < OUTS; o++)
        for (int half = 0; half < 2; half++) sums[o][half] = held[o][half];
}

bool by_dots(const float* x, i64 x_row, i64 rows, i64 in, const Linear* layers, int count, int threads,
             Parallel parallel) {
    auto work = [&](const Linear& layer, i64 begin, i64 end, i64) {
        for (i64 n = begin; n < end; n += TILE) {
            const int tile = end - n < TILE ? int(end - n) : TILE;
            for (i64 m = 0; m < rows; m += WIDE) {
                auto run = rows - m >= 3 ? multiply<3> : rows - m == 2 ? multiply<2> : multiply<1>;
                run(x + m * x_row, x_row, in, layer, n, tile, layer.out + m * layer.out_features);
            }
        }
    };
    return for_each_strip(layers, count, TILE * TILES_PER_TASK, 1, threads, parallel, work);
}

bool by_panels(const float* x, i64 x_row, i64 rows, i64 in, const Linear* layers, int count, int threads,
               Parallel parallel) {
    const i64 panels = (rows + PANEL - 1) / PANEL, blocks = (in + DEPTH - 1) / DEPTH;
    packed.reserve(size_t(panels * PANEL * in) * sizeof(float));
    float* all = reinterpret_cast<float*>(packed.memory);
    auto part = [&](i64 panel, i64 block) {  // [panel][block][k][PANEL]
        return all + (panel * in + block * DEPTH) * PANEL;
    };
    auto pack = [&](i64 task) {
        const i64 panel = task / blocks, block = task % blocks;
        const i64 depth = in - block * DEPTH < DEPTH ? in - block * DEPTH : DEPTH;
        float* to = part(panel, block);
        for (i64 k = 0; k < depth; k += 64)
            for (i64 row = 0; row < PANEL; row++) {
                const i64 m = panel * PANEL + row, stop = k + 64 < depth ? k + 64 : depth;
                const float* from = x + m * x_row + block * DEPTH;
                for (i64 at = k; at < stop; at++) to[at * PANEL + row] = m < rows ? from[at] : 0.0f;
            }
    };
    if (!for_each_task(panels * blocks, threads, parallel, pack)) return false;
    auto work = [&](const Linear& layer, i64 begin, i64 end, i64 group) {
        const i64 first = group * PANELS_PER_TASK;
        const i64 last = first + PANELS_PER_TASK < panels ? first + PANELS_PER_TASK : panels;
        alignas(64) vf sums[OUTS_PER_TASK / OUTS][PANELS_PER_TASK][OUTS][2] = {};
        for (i64 block = 0; block < blocks; block++) {
            const i64 depth = in - block * DEPTH < DEPTH ? in - block * DEPTH : DEPTH;
            for (i64 n = begin; n < end; n += OUTS) {
                const float* w[OUTS];
                for (int o = 0; o < OUTS; o++) w[o] = static_cast<const float*>(layer.w) + (n + o < end ? n + o : n) * in + block * DEPTH;
                for (i64 panel = first; panel < last; panel++)
                    multiply_panel(part(panel, block), w, depth, sums[(n - begin) / OUTS][panel - first]);
            }
        }
        for (i64 m = first * PANEL; m < last * PANEL && m < rows; m++)
            for (i64 n = begin; n < end; n++) {
                const vf* pair = sums[(n - begin) / OUTS][m / PANEL - first][(n - begin) % OUTS];
                put(layer, n, pair[m % PANEL / LANES][m % LANES], layer.out + m * layer.out_features + n);
            }
    };
    const i64 groups = (panels + PANELS_PER_TASK - 1) / PANELS_PER_TASK;
    return for_each_strip(layers, count, OUTS_PER_TASK, groups, threads, parallel, work);
}

}  // namespace

bool multiply_all(const float* x, i64 x_row, i64 rows, i64 in, const Linear* layers, int count, int threads,
                  Parallel parallel) {
    const i64 in_panels = (rows + PANEL - 1) / PANEL * PANEL;
    const auto run = double(rows) >= FULL_ENOUGH * double(in_panels) ? by_panels : by_dots;
    try {
        return run(x, x_row, rows, in, layers, count, threads, parallel);
    } catch (const std::bad_alloc&) {
        return false;
    }
}

extern "C" {

struct LinearCall {
    const float* x;
    const void* w;
    const float* bias;
    float* out;
    i64 rows, in, out_features, x_row, pairs, threads;
    Parallel parallel;
};

int linear(const LinearCall* call) {
    const LinearCall& c = *call;
    const Linear layer = {c.w, c.bias, c.out_features, c.out, false};
#if defined(PAIRS)
    if (c.pairs) {
        try {
            packed.reserve(Packed::size(c.rows, c.in));
        } catch (const std::bad_alloc&) {
            return 1;
        }
        const Packed x(packed.memory, c.rows, c.in);
        auto row = [&](i64 m, float*) { return c.x + m * c.x_row; };
        return pack_rows(x, int(c.threads), c.parallel, row) &&
                       multiply_packed(x, &layer, 1, int(c.threads), c.parallel)
                   ? 0
                   : 1;
    }
#endif
    return multiply_all(c.x, c.x_row, c.rows, c.in, &layer, 1, int(c.threads), c.parallel) ? 0 : 1;
}

// Whether this CPU multiplies bfloat16 in pairs: 0 no, 1 by vectors, 2 by tiles.
int pairs() {
#if defined(TILES)
    if (tiles_allowed()) return 2;
#endif
#if defined(PAIRS)
    return 1;
#else
    return 0;
#endif
}

}  // extern "C"
