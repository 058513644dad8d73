// A linear layer for few rows, as decode has them: out[m][n] = sum over k of x[m][k] * w[n][k], plus a bias.
//
// The weights are read once, as they are stored, in tiles of TILE rows; against each come two or three rows of x. General
// matrix products copy the weights into blocks first, which for a few rows costs more than the product.

#include "lanes.h"

namespace {

constexpr int TILE = 4;            // rows of weights at once
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

}  // namespace

extern "C" {

struct LinearCall {
    const float *x, *w, *bias;  // [rows, in] with x_row between rows, [out_features, in], [out_features] or null
    float* out;                 // [rows, out_features]
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

}  // extern "C"
