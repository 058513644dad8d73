// All layers of a Llama-like model over the tokens of one decode step, in one call.

#include <cmath>
#include <cstring>
#include <initializer_list>

#include "attention.h"
#include "exp2.h"
#include "lanes.h"
#include "linear.h"
#include "scratch.h"

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
    for (i64 i = 0; i < half; i++) {
        const float left = x[i], right = x[half + i];
        x[i] = left * cos[i] - right * sin[i];
        x[half + i] = right * cos[half + i] + left * sin[half + i];
    }
}

inline vf silu(vf x) { return x / (1.0f + exp2(at_most(x * float(-LOG2E), 126.0f))); }

// gate = silu(gate) * up
void join(float* gate, const float* up, i64 size) {
    i64 i = 0;
    for (; i + LANES <= size; i += LANES) store(gate + i, silu(load(gate + i)) * load(up + i));
    for (; i < size; i++) gate[i] = silu(splat(gate[i]))[0] * up[i];
}

// Writes the new keys and values [tokens, kv_heads, dim] of a document behind those of their slots; how many.
i64 keep(const OwnCall& c, const float* k, const float* v, i64 dim) {
    i64 token = 0;
    float* const keys = static_cast<float*>(const_cast<void*>(c.k));
    float* const values = static_cast<float*>(const_cast<void*>(c.v));
    for (i64 slot = 0; slot < c.slots; slot++)
        for (i64 at = c.lengths[slot]; at < c.lengths[slot] + c.counts[slot]; at++, token++)
            for (i64 head = 0; head < c.kv_heads; head++) {
                const i64 from = (token * c.kv_heads + head) * dim;
                float* const to_k = keys + slot * c.k_slot + head * c.k_head + at * c.k_token;
                float* const to_v = values + slot * c.v_slot + head * c.v_head + at * c.v_token;
                std::memcpy(to_k, k + from, size_t(dim) * sizeof(float));
                std::memcpy(to_v, v + from, size_t(dim) * sizeof(float));
            }
    return token;
}

}  // namespace

extern "C" {

struct DecoderLayer {
    const float *norm, *q, *q_bias, *k, *k_bias, *v, *v_bias, *q_norm, *k_norm, *o, *o_bias;  // null: none
    const float *mlp_norm, *gate, *gate_bias, *up, *up_bias, *down, *down_bias;
    i64 rotated;  // numbers of a head that are rotated
    double norm_eps, q_eps, k_eps, mlp_eps;
};

struct DecoderCall {
    float* x;                // [tokens, hidden]: embeddings, and in the end what leaves the last layer
    const float *cos, *sin;  // [tokens, width]
    const DecoderLayer* layers;
    PrefixCall* prefix;  // [num_layers, documents], as is `own`: without q, what comes out, and the threads
    OwnCall* own;        // the new keys and values are written where its k and v are
    i64 num_layers, documents, tokens, hidden, inner, heads, kv_heads, dim, width, threads;
    Parallel parallel;
};

int decoder_step(const DecoderCall* call) {
    const DecoderCall& c = *call;
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
    try {
        scratch.reserve(size_t(c.tokens * (c.hidden + 2 * q_size + 2 * kv_size + 2 * c.inner) + shared_size) * 4);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    float* normed = reinterpret_cast<float*>(scratch.memory);
    float* q = normed + c.tokens * c.hidden;
    float* attended = q + c.tokens * q_size;
    float* k = attended + c.tokens * q_size;
    float* v = k + c.tokens * kv_size;
    float* gate = v + c.tokens * kv_size;
    float* up = gate + c.tokens * c.inner;
    float* shared = up + c.tokens * c.inner;

    auto linears = [&](const float* x, i64 in, std::initializer_list<Linear> layers) {
        return multiply_all(x, in, c.tokens, in, layers.begin(), int(layers.size()), threads.count, threads.parallel);
    };
    auto normalised = [&](const float* weight, double eps) {
        return for_each_row(c.tokens, c.hidden, threads, [&](i64 token) {
            normalise(c.x + token * c.hidden, weight, c.hidden, eps, normed + token * c.hidden);
        });
    };

    for (i64 at = 0; at < c.num_layers; at++) {
        const DecoderLayer& layer = c.layers[at];
        PrefixCall* prefix = c.prefix + at * c.documents;
        OwnCall* own = c.own + at * c.documents;
        float* free = shared;
        i64 token = 0;
        for (i64 i = 0; i < c.documents; i++) {
            prefix[i].q = own[i].q = q + token * q_size;
            prefix[i].out = free;
            own[i].shared = free;
            free += prefix[i].parts * c.heads * prefix[i].tokens * c.dim;
            prefix[i].lse = free;
            own[i].shared_lse = free;
            free += prefix[i].parts * c.heads * prefix[i].tokens;
            own[i].parts = prefix[i].parts;
            own[i].out = attended + token * q_size;
            token += own[i].tokens;
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
        };
        if (!normalised(layer.norm, layer.norm_eps)) return 1;
        if (!linears(normed, c.hidden, {{layer.q, layer.q_bias, q_size, q, false},
                                        {layer.k, layer.k_bias, kv_size, k, false},
                                        {layer.v, layer.v_bias, kv_size, v, false}}))
            return 1;
        if (!for_each_row(c.tokens, q_size + kv_size, threads, turn)) return 1;
        token = 0;
        for (i64 i = 0; i < c.documents; i++)
            token += keep(own[i], k + token * kv_size, v + token * kv_size, c.dim);
        if (!attend_prefixes(prefix, c.documents, threads.count, threads.parallel)) return 1;
        if (!attend_owns(own, c.documents, threads.count, threads.parallel)) return 1;
        if (!linears(attended, q_size, {{layer.o, layer.o_bias, c.hidden, c.x, true}})) return 1;

        if (!normalised(layer.mlp_norm, layer.mlp_eps)) return 1;
        if (!linears(normed, c.hidden, {{layer.gate, layer.gate_bias, c.inner, gate, false},
                                        {layer.up, layer.up_bias, c.inner, up, false}}))
            return 1;
        auto joined = [&](i64 token) { join(gate + token * c.inner, up + token * c.inner, c.inner); };
        if (!for_each_row(c.tokens, c.inner, threads, joined)) return 1;
        if (!linears(gate, c.inner, {{layer.down, layer.down_bias, c.hidden, c.x, true}})) return 1;
    }
    return 0;
}

}  // extern "C"
