// Attention of one layer, as attention.cpp computes it.

#pragma once

#include "lanes.h"

// Strides count elements. Types: 0 float32, 1 bfloat16.
struct PrefixCall {
    const void *q, *k, *v;
    float *out, *lse;        // [parts, kv_heads, tokens * group, v_dim], or at the strides o_..; and without v_dim
    const i64* positions;    // of each token, or null: the tokens are the last of the keys
    i64 q_type, kv_type, kv_heads, group, tokens, keys, dim, v_dim;
    i64 q_head, q_token, q_member, k_head, k_token, v_head, v_token, o_head, o_token;
    i64 window, begin, parts, rows_per_task, threads;
    double scale, softcap;
    Parallel parallel;
};

struct OwnCall {
    const void *q, *k, *v;
    void* out;                       // [tokens, kv_heads * group, v_dim], of q's type
    const float *shared, *shared_lse;  // [parts, kv_heads, tokens * group, v_dim] and without v_dim
    const float* sinks;              // [kv_heads * group] or null
    const i64 *counts, *lengths;     // [slots]: new tokens, and those stored before them
    i64 q_type, kv_type, slots, kv_heads, group, tokens, dim, v_dim;
    i64 q_head, q_token, q_member, k_slot, k_head, k_token, v_slot, v_head, v_token;
    i64 window, parts, rows_per_task, threads;
    double scale, softcap;
    Parallel parallel;
};

// Several at once, so that all threads have enough to do. False: memory ran out.
bool attend_prefixes(const PrefixCall* calls, i64 count, int threads, Parallel parallel);
bool attend_owns(const OwnCall* calls, i64 count, int threads, Parallel parallel);
