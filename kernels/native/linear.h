// Linear layers, as linear.cpp computes them.

#pragma once

#include "lanes.h"

struct Linear {
    const void* w;      // [out_features, in]
    const float* bias;  // [out_features] or null
    i64 out_features;
    float* out;  // [rows, out_features]
    bool add;    // to what is in `out`
};

// Several layers of float32 over the same x [rows, in], with x_row between its rows. False: memory ran out.
bool multiply_all(const float* x, i64 x_row, i64 rows, i64 in, const Linear* layers, int count, int threads,
                  Parallel parallel);

namespace {

// Hands out strips of `step` rows of weights of all layers, for one block of x after the other: work(layer, first row,
// the row behind the last, block of x).
template <typename F>
bool for_each_strip(const Linear* layers, int count, i64 step, i64 blocks, int threads, Parallel parallel,
                    const F& work) {
    i64 strips = 0;
    for (int i = 0; i < count; i++) strips += (layers[i].out_features + step - 1) / step;
    return for_each_task(strips * blocks, threads, parallel, [&](i64 task) {
        const Linear* layer = layers;
        i64 begin = task % strips * step;
        for (i64 all; begin >= (all = (layer->out_features + step - 1) / step * step); layer++) begin -= all;
        work(*layer, begin, begin + step < layer->out_features ? begin + step : layer->out_features, task / strips);
    });
}

}  // namespace
