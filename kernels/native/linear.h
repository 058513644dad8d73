// Linear layers, as linear.cpp computes them.

#pragma once

#include "lanes.h"

struct Linear {
    const float *w, *bias;  // [out_features, in], [out_features] or null
    i64 out_features;
    float* out;  // [rows, out_features]
    bool add;    // to what is in `out`
};

// Several layers over the same x [rows, in], with x_row between its rows. False: memory ran out.
bool multiply_all(const float* x, i64 x_row, i64 rows, i64 in, const Linear* layers, int count, int threads,
                  Parallel parallel);
