// A linear layer for the rows of a decode step: out[m][n] = sum over k of x[m][k] * w[n][k], plus a bias.
//
// The weights are read as they are stored. A few rows: by dot products along k, in tiles of TILE rows of weights against
// two or three rows of x. More rows: x is transposed once into panels of PANEL rows, which lie along the lanes, and each
// weight is broadcast; so no sum has to be taken across lanes, and the weights need no copy in another order, which for
// few rows costs general matrix products more than the product.

#include "lanes.h"

namespace {

constexpr int TILE = 4;            // rows of weights at once, by dot products
constexpr int WIDE = 3;            // rows of x at once: TILE * WIDE sums stay in registers
constexpr i64 TILES_PER_TASK = 8;  // small enough to share out evenly

inline float sum(vf x) {
    float total = 0;
    for (int lane = 0; lane < LANES; lane++) total += x[lane];
    return total;
}

// The products of `tile` rows of weights with M rows of x.
template <int M>
void multiply(const float* x, i64 x_row, const float* w, int tile, i64 in, const float* bias, float* out, i64 out_row) {
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
            out[m * out_row + n] = total + (bias ? bias[n] : 0.0f);
        }
}

constexpr int PANEL = 2 * LANES;           // rows of x side by side
constexpr int OUTS = (REGISTERS - 4) / 2;  // rows of weights at once: twice as many sums stay in registers
constexpr i64 OUTS_PER_TASK = 8 * OUTS;
constexpr i64 DEPTH = 512;  // of a block along k: a panel's part of it stays in the second cache, beside the weights'
constexpr i64 PANELS_PER_TASK = 128 / PANEL;

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

}  // namespace

extern "C" {

struct LinearCall {
    const float *x, *w, *bias;  // [rows, in] with x_row between rows, [out_features, in], [out_features] or null
    float* out;                 // [rows, out_features]
    float* scratch;             // of linear_panels: `in` floats for each row, rows rounded up to PANEL
    i64 rows, in, out_features, x_row, threads;
    Parallel parallel;
};

int linear(const LinearCall* call) {
    const LinearCall& c = *call;
    const i64 step = TILE * TILES_PER_TASK;
    auto work = [&](i64 task) {
        const i64 end = (task + 1) * step < c.out_features ? (task + 1) * step : c.out_features;
        for (i64 n = task * step; n < end; n += TILE) {
            const int tile = end - n < TILE ? int(end - n) : TILE;
            const float* bias = c.bias ? c.bias + n : nullptr;
            for (i64 m = 0; m < c.rows; m += WIDE) {
                auto run = c.rows - m >= 3 ? multiply<3> : c.rows - m == 2 ? multiply<2> : multiply<1>;
                run(c.x + m * c.x_row, c.x_row, c.w + n * c.in, tile, c.in, bias, c.out + m * c.out_features + n,
                    c.out_features);
            }
        }
    };
    return for_each_task((c.out_features + step - 1) / step, int(c.threads), c.parallel, work) ? 0 : 1;
}

int linear_panel_rows() { return PANEL; }

// The same through panels.
int linear_panels(const LinearCall* call) {
    const LinearCall& c = *call;
    const i64 panels = (c.rows + PANEL - 1) / PANEL, blocks = (c.in + DEPTH - 1) / DEPTH;
    auto part = [&](i64 panel, i64 block) {  // of scratch: [panel][block][k][PANEL]
        return c.scratch + (panel * c.in + block * DEPTH) * PANEL;
    };
    auto pack = [&](i64 task) {
        const i64 panel = task / blocks, block = task % blocks;
        const i64 depth = c.in - block * DEPTH < DEPTH ? c.in - block * DEPTH : DEPTH;
        float* to = part(panel, block);
        for (i64 k = 0; k < depth; k += 64)
            for (i64 row = 0; row < PANEL; row++) {
                const i64 m = panel * PANEL + row, stop = k + 64 < depth ? k + 64 : depth;
                const float* from = c.x + m * c.x_row + block * DEPTH;
                for (i64 at = k; at < stop; at++) to[at * PANEL + row] = m < c.rows ? from[at] : 0.0f;
            }
    };
    if (!for_each_task(panels * blocks, int(c.threads), c.parallel, pack)) return 1;
    const i64 groups = (panels + PANELS_PER_TASK - 1) / PANELS_PER_TASK;
    const i64 strips = (c.out_features + OUTS_PER_TASK - 1) / OUTS_PER_TASK;
    auto work = [&](i64 task) {
        const i64 first = task % groups * PANELS_PER_TASK, begin = task / groups * OUTS_PER_TASK;
        const i64 last = first + PANELS_PER_TASK < panels ? first + PANELS_PER_TASK : panels;
        const i64 end = begin + OUTS_PER_TASK < c.out_features ? begin + OUTS_PER_TASK : c.out_features;
        alignas(64) vf sums[OUTS_PER_TASK / OUTS][PANELS_PER_TASK][OUTS][2] = {};
        for (i64 block = 0; block < blocks; block++) {
            const i64 depth = c.in - block * DEPTH < DEPTH ? c.in - block * DEPTH : DEPTH;
            for (i64 n = begin; n < end; n += OUTS) {
                const float* rows[OUTS];
                for (int o = 0; o < OUTS; o++) rows[o] = c.w + (n + o < end ? n + o : n) * c.in + block * DEPTH;
                for (i64 panel = first; panel < last; panel++)
                    multiply_panel(part(panel, block), rows, depth, sums[(n - begin) / OUTS][panel - first]);
            }
        }
        for (i64 m = first * PANEL; m < last * PANEL && m < c.rows; m++)
            for (i64 n = begin; n < end; n++) {
                const vf* pair = sums[(n - begin) / OUTS][m / PANEL - first][(n - begin) % OUTS];
                const float total = pair[m % PANEL / LANES][m % LANES];
                c.out[m * c.out_features + n] = total + (c.bias ? c.bias[n] : 0.0f);
            }
    };
    return for_each_task(groups * strips, int(c.threads), c.parallel, work) ? 0 : 1;
}

}  // extern "C"
