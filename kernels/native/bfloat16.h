// bfloat16 as it is stored.

#pragma once

#include <cstdint>
#include <cstring>

#include "lanes.h"

namespace {

typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));

struct bf16 {
    uint16_t bits;
};

inline vf load(const bf16* p) {
    vh bits;
    std::memcpy(&bits, p, sizeof bits);
    return (vf)(__builtin_convertvector(bits, vu) << 16);
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
inline bf16 to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return {x != x ? uint16_t((bits >> 16) | 0x40) : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

}  // namespace
