// Powers of two of whole vectors.

#pragma once

#include "lanes.h"

namespace {

typedef int32_t vi __attribute__((vector_size(LANES * 4)));

constexpr double LOG2E = 1.4426950408889634;

inline vf splat(float x) { return x - vf{}; }
inline vf at_least(vf x, float low) { vf l = splat(low); return l > x ? l : x; }   // NaN stays
inline vf at_most(vf x, float high) { vf h = splat(high); return h < x ? h : x; }  // NaN stays

// 2^x for x < 127, with a relative error below 2e-7; what is below 2^-126 becomes 0.
inline vf exp2(vf x) {
    x = at_least(x, -127.0f);
    const vf magic = splat(12582912.0f + 127.0f);  // 1.5 * 2^23 rounds to a whole number, in the low bits; 127: bias
    vf t = x + magic;
    vf f = x - (t - magic);
    vf p = splat(0.001326472731307149f);
    p = p * f + 0.009671512991189957f;
    p = p * f + 0.05550733581185341f;
    p = p * f + 0.24022242426872253f;
    p = p * f + 0.6931470036506653f;
    p = p * f + 1.0f;
    return p * (vf)((vi)t << 23);
}

// x / (1 + e^-x)
inline vf silu(vf x) { return x / (1.0f + exp2(at_most(x * float(-LOG2E), 126.0f))); }

}  // namespace
