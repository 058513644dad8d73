// All layers of a Llama-like model in one call, over the tokens of a decode step or of a part of a document. What goes
// from layer to layer is float32; weights, keys and values are float32 or bfloat16.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "attention.h"
#include "bfloat16.h"
#include "exp2.h"
#include "lanes.h"
#include "linear.h"
#include "linear_pairs.h"
#include "scratch.h"

struct DecoderLayer {
    const void *q, *k, *v, *o, *gate, *up, *down;                                           // weights
    const float *norm, *q_bias, *k_bias, *v_bias, *q_norm, *k_norm, *o_bias;                // null: none
    const float *mlp_norm, *gate_bias, *up_bias, *down_bias;
    i64 rotated;  // numbers of a head that are rotated
    double norm_eps, q_eps, k_eps, mlp_eps;
};

struct DecoderCall {
    float* x;                // [tokens, hidden]: embeddings, and in the end what leaves the last layer
    const float *cos, *sin;  // [tokens, width]
    const DecoderLayer* layers;
    PrefixCall* prefix;  // [num_layers, documents], as is `own`: without q, what comes out, and the threads
    OwnCall* own;        // the new keys and values are written where its k and v are; null: where those of prefix are
    i64 num_layers, documents, tokens, hidden, inner, heads, kv_heads, dim, width, pairs, threads;
    Parallel parallel;
};

namespace {

constexpr i64 FEW_NUMBERS = 16384;  // so many are worked through before a second thread has begun

thread_local Scratch scratch;

struct Threads {
    int count;
    Parallel parallel;
};

// work(row) for rows of so many numbers.
template <typename F>
bool for_each_row(i64 rows, i64 numbers, const Threads& threads, const F& work) {
    return for_each_task(rows, rows * numbers < FEW_NUMBERS ? 1 : threads.count, threads.parallel, work);
}

// Root mean square normalisation (arXiv:1910.07467).
void normalise(const float* x, const float* weight, i64 size, double eps, float* out) {
    vf squares = {};
    i64 i = 0;
    for (; i + LANES <= size; i += LANES) squares += load(x + i) * load(x + i);
    float total = sum(squares);
    for (; i < size; i++) total += x[i] * x[i];
    const float share = 1.0f / std::sqrt(total / float(size) + float(eps));
    for (i = 0; i + LANES <= size; i += LANES) store(out + i, load(x + i) * share * load(weight + i));
    for (; i < size; i++) out[i] = x[i] * share * weight[i];
}

// Rotary position embedding (arXiv:2104.09864) of the first `size` numbers, whose halves belong together.
void rotate(float* x, const float* cos, const float* sin, i64 size) {
    const i64 half = size / 2;
#pragma GCC ivdep
    for (i64 i = 0; i < half; i++) {
        const float left = x[i], right = x[half + i];
        x[i] = left * cos[i] - right * sin[i];
        x[half + i] = right * cos[half + i] + left * sin[half + i];
    }
}

// gate = silu(gate) * up
void join(float* gate, const float* up, i64 size) {
    i64 i = 0;
    for (; i + LANES <= size; i += LANES) store(gate + i, silu(load(gate + i)) * load(up + i));
    for (; i < size; i++) gate[i] = silu(splat(gate[i]))[0] * up[i];
}

inline void copy(const float* from, i64 size, float* to) { std::memcpy(to, from, size_t(size) * sizeof(float)); }
inline void copy(const float* from, i64 size, bf16* to) {
#if defined(PAIRS)
    for (; size >= 16; size -= 16, from += 16, to += 16)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from)));
#endif
    for (i64 i = 0; i < size; i++) to[i] = to_bf16(from[i]);
}

// Where the new keys and values of a token belong: behind those of a slot of a document's questions.
struct Place {
    i64 document, slot, at;
};

std::vector<Place> own_places(const OwnCall* own, i64 documents) {
    std::vector<Place> places;
    for (i64 document = 0; document < documents; document++) {
        const OwnCall& c = own[document];
        for (i64 slot = 0; slot < c.slots; slot++)
            for (i64 at = c.lengths[slot]; at < c.lengths[slot] + c.counts[slot]; at++)
                places.push_back({document, slot, at});
    }
    return places;
}

// Writes those of a token, [kv_heads, dim].
template <typename T>
void keep_own(const OwnCall& c, const Place& place, const float* k, const float* v, i64 dim) {
    T* const keys = static_cast<T*>(const_cast<void*>(c.k)) + place.slot * c.k_slot + place.at * c.k_token;
    T* const values = static_cast<T*>(const_cast<void*>(c.v)) + place.slot * c.v_slot + place.at * c.v_token;
    for (i64 head = 0; head < c.kv_heads; head++) {
        copy(k + head * dim, dim, keys + head * c.k_head);
        copy(v + head * dim, dim, values + head * c.v_head);
    }
}

// The same for a token of a document that is being read, whose new tokens are the last of its keys.
template <typename T>
void keep_read(const PrefixCall& c, i64 token, const float* k, const float* v, i64 dim) {
    T* const keys = static_cast<T*>(const_cast<void*>(c.k)) + (c.keys - c.tokens + token) * c.k_token;
    T* const values = static_cast<T*>(const_cast<void*>(c.v)) + (c.keys - c.tokens + token) * c.v_token;
    for (i64 head = 0; head < c.kv_heads; head++) {
        copy(k + head * dim, dim, keys + head * c.k_head);
        copy(v + head * dim, dim, values + head * c.v_head);
    }
}

size_t in_bytes(i64 floats) { return (size_t(floats) * 4 + 63) & ~size_t(63); }

// Norms and linear layers over all tokens of a call, in float32.
struct Floats {
    typedef float Kept;
    const DecoderCall& c;
    const Threads& threads;
    float *normed, *gate, *up;

    static size_t size(const DecoderCall& c) { return in_bytes(c.tokens * c.hidden) + 2 * in_bytes(c.tokens * c.inner); }
    Floats(const DecoderCall& call, const Threads& given, char* memory) : c(call), threads(given) {
        normed = reinterpret_cast<float*>(memory);
        gate = reinterpret_cast<float*>(memory + in_bytes(c.tokens * c.hidden));
        up = reinterpret_cast<float*>(memory + in_bytes(c.tokens * c.hidden) + in_bytes(c.tokens * c.inner));
    }
    bool linears(const float* x, i64 in, std::initializer_list<Linear> layers) {
        return multiply_all(x, in, c.tokens, in, layers.begin(), int(layers.size()), threads.count, threads.parallel);
    }
    bool normalised(const float* weight, double eps, std::initializer_list<Linear> layers) {
        auto row = [&](i64 token) {
            normalise(c.x + token * c.hidden, weight, c.hidden, eps, normed + token * c.hidden);
        };
        return for_each_row(c.tokens, c.hidden, threads, row) && linears(normed, c.hidden, layers);
    }
    bool feed_forward(const DecoderLayer& layer) {
        auto joined = [&](i64 token) { join(gate + token * c.inner, up + token * c.inner, c.inner); };
        return normalised(layer.mlp_norm, layer.mlp_eps, {{layer.gate, layer.gate_bias, c.inner, gate, false},
                                                          {layer.up, layer.up_bias, c.inner, up, false}}) &&
               for_each_row(c.tokens, c.inner, threads, joined) &&
               linears(gate, c.inner, {{layer.down, layer.down_bias, c.hidden, c.x, true}});
    }
};

#if defined(PAIRS)
// The same with weights in bfloat16: what is multiplied by them is rounded when it is packed, and nothing else.
struct Pairs {
    typedef bf16 Kept;
    const DecoderCall& c;
    const Threads& threads;
    char *packed, *inner;

    static i64 widest(const DecoderCall& c) { return std::max(c.hidden, c.heads * c.dim); }
    static size_t size(const DecoderCall& c) {
        return Packed::size(c.tokens, widest(c)) + Packed::size(c.tokens, c.inner);
    }
    Pairs(const DecoderCall& call, const Threads& given, char* memory)
        : c(call), threads(given), packed(memory), inner(memory + Packed::size(c.tokens, widest(c))) {}
    bool linears(const float* x, i64 in, std::initializer_list<Linear> layers) {
        const Packed to(packed, c.tokens, in);
        return pack_rows(to, threads.count, threads.parallel, [&](i64 m, float*) { return x + m * in; }) &&
               multiply_packed(to, layers.begin(), int(layers.size()), threads.count, threads.parallel);
    }
    bool pack_normalised(const float* weight, double eps, const Packed& to) {
        return pack_rows(to, threads.count, threads.parallel, [&](i64 m, float* memory) {
            normalise(c.x + m * c.hidden, weight, c.hidden, eps, memory);
            return static_cast<const float*>(memory);
        });
    }
    bool normalised(const float* weight, double eps, std::initializer_list<Linear> layers) {
        const Packed to(packed, c.tokens, c.hidden);
        return pack_normalised(weight, eps, to) &&
               multiply_packed(to, layers.begin(), int(layers.size()), threads.count, threads.parallel);
    }
    bool feed_forward(const DecoderLayer& layer) {
        const Packed x(packed, c.tokens, c.hidden), between(inner, c.tokens, c.inner);
        const Linear gate = {layer.gate, layer.gate_bias, c.inner, nullptr, false};
        const Linear up = {layer.up, layer.up_bias, c.inner, nullptr, false};
        const Linear down = {layer.down, layer.down_bias, c.hidden, c.x, true};
        return pack_normalised(layer.mlp_norm, layer.mlp_eps, x) &&
               gate_packed(x, gate, up, between, threads.count, threads.parallel) &&
               multiply_packed(between, &down, 1, threads.count, threads.parallel);
    }
};
#endif

template <typename Maths>
bool run(const DecoderCall& c) {
    typedef typename Maths::Kept Kept;
    const Threads threads = {int(c.threads), c.parallel};
    const i64 q_size = c.heads * c.dim, kv_size = c.kv_heads * c.dim;

    i64 shared_size = 0;  // numbers that the documents' parts of a layer take
    for (i64 layer = 0; layer < c.num_layers; layer++) {
        i64 size = 0;
        for (i64 i = 0; i < c.documents; i++) {
            const PrefixCall& part = c.prefix[layer * c.documents + i];
            size += part.parts * c.heads * part.tokens * (c.dim + 1);
        }
        shared_size = size > shared_size ? size : shared_size;
    }
    scratch.reserve(Maths::size(c) + 2 * in_bytes(c.tokens * q_size) + 2 * in_bytes(c.tokens * kv_size) +
                    in_bytes(shared_size));
    char* memory = scratch.memory;
    auto take = [&](i64 floats) {
        float* taken = reinterpret_cast<float*>(memory);
        memory += in_bytes(floats);
        return taken;
    };
    float* const q = take(c.tokens * q_size);
    float* const attended = take(c.tokens * q_size);
    float* const k = take(c.tokens * kv_size);
    float* const v = take(c.tokens * kv_size);
    float* const shared = take(shared_size);
    Maths maths(c, threads, memory);
    const std::vector<Place> places = c.own ? own_places(c.own, c.documents) : std::vector<Place>();

    for (i64 at = 0; at < c.num_layers; at++) {
        const DecoderLayer& layer = c.layers[at];
        PrefixCall* prefix = c.prefix + at * c.documents;
        OwnCall* own = c.own ? c.own + at * c.documents : nullptr;
        float* free = shared;
        i64 token = 0;
        for (i64 i = 0; i < c.documents; i++) {
            prefix[i].q = q + token * q_size;
            prefix[i].out = free;
            prefix[i].lse = free + prefix[i].parts * c.heads * prefix[i].tokens * c.dim;
            free = prefix[i].lse + prefix[i].parts * c.heads * prefix[i].tokens;
            if (own) {
                own[i].q = prefix[i].q;
                own[i].shared = prefix[i].out;
                own[i].shared_lse = prefix[i].lse;
                own[i].parts = prefix[i].parts;
                own[i].out = attended + token * q_size;
            } else {
                prefix[i].out = attended;
                prefix[i].o_head = c.heads / c.kv_heads * c.dim;
                prefix[i].o_token = q_size;
            }
            token += prefix[i].tokens;
        }

        auto turn = [&](i64 token) {
            const float *cos = c.cos + token * c.width, *sin = c.sin + token * c.width;
            for (i64 head = 0; head < c.heads; head++) {
                float* x = q + token * q_size + head * c.dim;
                if (layer.q_norm) normalise(x, layer.q_norm, c.dim, layer.q_eps, x);
                rotate(x, cos, sin, layer.rotated);
            }
            for (i64 head = 0; head < c.kv_heads; head++) {
                float* x = k + token * kv_size + head * c.dim;
                if (layer.k_norm) normalise(x, layer.k_norm, c.dim, layer.k_eps, x);
                rotate(x, cos, sin, layer.rotated);
            }
            const float *new_k = k + token * kv_size, *new_v = v + token * kv_size;
            if (own)
                keep_own<Kept>(own[places[size_t(token)].document], places[size_t(token)], new_k, new_v, c.dim);
            else
                keep_read<Kept>(*prefix, token, new_k, new_v, c.dim);
        };
        if (!maths.normalised(layer.norm, layer.norm_eps, {{layer.q, layer.q_bias, q_size, q, false},
                                                           {layer.k, layer.k_bias, kv_size, k, false},
                                                           {layer.v, layer.v_bias, kv_size, v, false}}) ||
            !for_each_row(c.tokens, q_size + kv_size, threads, turn))
            return false;
        if (!attend_prefixes(prefix, c.documents, threads.count, threads.parallel)) return false;
        if (own && !attend_owns(own, c.documents, threads.count, threads.parallel)) return false;
        if (!maths.linears(attended, q_size, {{layer.o, layer.o_bias, c.hidden, c.x, true}})) return false;
        if (!maths.feed_forward(layer)) return false;
    }
    return true;
}

}  // namespace

extern "C" int decoder_step(const DecoderCall* call) {
    try {
#if defined(PAIRS)
        if (call->pairs) return run<Pairs>(*call) ? 0 : 1;
#endif
        return run<Floats>(*call) ? 0 : 1;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}
