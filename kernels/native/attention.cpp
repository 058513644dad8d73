// Attention of one layer on a CPU, with the running softmax of arXiv:1805.02867 in the blocks of arXiv:2205.14135.
//
// Everything is computed transposed: the query rows lie along the vector lanes, in panels of up to 3 vectors. A score
// is then a broadcast key element times a vector of queries, so keys are read as they are stored, the softmax runs down
// the lanes without a horizontal step, and values are again broadcast. Scores are kept in units of log 2.
//
// NaN has to stay NaN and a row that sees no key has to come out as 0, so this is not compiled with -ffast-math, and
// the order of operands in `at_least`, `at_most` and the maximum matters.

#include <cmath>
#include <cstdint>
#include <limits>
#include <new>
#include <vector>

#include "attention.h"
#include "attention_blocks.h"
#include "attention_few.h"
#include "attention_narrow.h"
#include "attention_pairs.h"

namespace {

template <typename T>
Found attend(const Rows& rows, const Keys& keys, const Softmax& softmax) {
    if (rows.count <= FEW && keys.dim % LANES == 0 && keys.v_dim % LANES == 0)
        return attend_few<T>(rows, keys, softmax);
#if defined(PAIRS)
    if (sizeof(T) == 2 && takes_narrow(rows, keys)) return attend_narrow(rows, keys, softmax);
    if (sizeof(T) == 2 && takes_pairs(keys)) return attend_pairs(rows, keys, softmax);
#endif
    return attend_blocks<T>(rows, keys, softmax);
}

inline void scale(const float* x, float by, i64 size, float* out) {
    i64 i = 0;
    for (; i + LANES <= size; i += LANES) store(out + i, load(x + i) * by);
    for (; i < size; i++) out[i] = x[i] * by;
}

inline void add_scaled(const float* x, float by, i64 size, float* out) {
    i64 i = 0;
    for (; i + LANES <= size; i += LANES) store(out + i, load(out + i) + load(x + i) * by);
    for (; i < size; i++) out[i] += x[i] * by;
}

// One call, cut into tasks.
struct PrefixWork {
    const PrefixCall& c;
    i64 rows, blocks, step, tasks;

    explicit PrefixWork(const PrefixCall& call) : c(call) {
        rows = c.tokens * c.group;
        blocks = (rows + c.rows_per_task - 1) / c.rows_per_task;
        step = ((c.keys - c.begin + c.parts - 1) / c.parts + 15) / 16 * 16;
        tasks = c.kv_heads * c.parts * blocks;
    }

    Keys keys(i64 task) const {
        const i64 size = c.kv_type ? 2 : 4, head = task / (c.parts * blocks), part = task / blocks % c.parts;
        const i64 begin = c.begin + part * step < c.keys ? c.begin + part * step : c.keys;
        const i64 end = begin + step < c.keys ? begin + step : c.keys;
        return {static_cast<const char*>(c.k) + head * c.k_head * size,
                static_cast<const char*>(c.v) + head * c.v_head * size,
                c.k_token, c.v_token, begin, end, int(c.dim), int(c.v_dim)};
    }

    // `other`: the work of which this thread will probably run `next` afterwards; null: none.
    void run(i64 task, const PrefixWork* other, i64 next) const {
        const i64 q_size = c.q_type ? 2 : 4;
        const i64 head = task / (c.parts * blocks), part = task / blocks % c.parts;
        const i64 first_row = (blocks - 1 - task % blocks) * c.rows_per_task;  // later rows see more keys: first
        const i64 count = rows - first_row < c.rows_per_task ? rows - first_row : c.rows_per_task;
        const Rows these = {static_cast<const char*>(c.q) + head * c.q_head * q_size, c.q_type == 1, c.q_token,
                            c.q_member, first_row, count, int(c.group), c.keys - c.tokens, c.positions, c.window};
        Keys now = keys(task);
        const Keys coming = other ? other->keys(next) : now;
        if (other) now.next = &coming;
        const Softmax softmax = {float(c.scale), float(c.softcap)};
        const Found found = c.kv_type ? attend<bf16>(these, now, softmax) : attend<float>(these, now, softmax);
        for (i64 row = 0; row < count; row++) {
            const float* values = found.out + row * found.out_dim;
            const i64 to = (part * c.kv_heads + head) * rows + first_row + row;
            const float total = found.total[row], share = total == 0 ? 0.0f : 1.0f / total;
            const i64 token = (first_row + row) / c.group, member = (first_row + row) % c.group;
            float* out = c.out + (part * c.kv_heads * rows + member) * c.v_dim + head * c.o_head + token * c.o_token;
            scale(values, share, c.v_dim, out);
            c.lse[to] = float((found.peak[row] + std::log2(double(total))) * LN2);
        }
    }
};

constexpr i64 MOST_FETCHED = 64;  // keys

struct OwnWork {
    struct Piece {
        i64 slot, first, tokens, packed;  // tokens [first, first + tokens) of a slot, which are packed from `packed` on
    };
    const OwnCall& c;
    std::vector<Piece> pieces;
    i64 tasks;

    explicit OwnWork(const OwnCall& call) : c(call) {
        const i64 most = c.rows_per_task / c.group > 1 ? c.rows_per_task / c.group : 1;
        i64 packed = 0;
        for (i64 slot = 0; slot < c.slots; slot++) {
            for (i64 first = 0; first < c.counts[slot]; first += most) {
                const i64 left = c.counts[slot] - first, tokens = left < most ? left : most;
                pieces.push_back({slot, first, tokens, packed});
                packed += tokens;
            }
        }
        tasks = i64(pieces.size()) * c.kv_heads;
    }

    // The keys and values of a task lie in a place of their own: they are fetched while another one is computed.
    void fetch_for(i64 task) const {
        const Piece& piece = pieces[size_t(task / c.kv_heads)];
        const i64 size = c.kv_type ? 2 : 4, head = task % c.kv_heads;
        const i64 end = c.lengths[piece.slot] + piece.first + piece.tokens;
        const char* k = static_cast<const char*>(c.k) + (piece.slot * c.k_slot + head * c.k_head) * size;
        const char* v = static_cast<const char*>(c.v) + (piece.slot * c.v_slot + head * c.v_head) * size;
        for (i64 key = end > MOST_FETCHED ? end - MOST_FETCHED : 0; key < end; key++) {
            const char *one_k = k + key * c.k_token * size, *one_v = v + key * c.v_token * size;
            for (i64 byte = 0; byte < c.dim * size; byte += 64) fetch_line(one_k + byte);
            for (i64 byte = 0; byte < c.v_dim * size; byte += 64) fetch_line(one_v + byte);
        }
    }

    void run(i64 task, const OwnWork* other, i64 next) const {
        if (other) other->fetch_for(next);
        const i64 q_size = c.q_type ? 2 : 4, kv_size = c.kv_type ? 2 : 4, all = c.tokens * c.group;
        const Piece& piece = pieces[size_t(task / c.kv_heads)];
        const i64 head = task % c.kv_heads;
        const i64 position = c.lengths[piece.slot] + piece.first, end = position + piece.tokens;
        const Rows rows = {static_cast<const char*>(c.q) + (head * c.q_head + piece.packed * c.q_token) * q_size,
                           c.q_type == 1, c.q_token, c.q_member, 0, piece.tokens * c.group, int(c.group), position,
                           nullptr, c.window};
        const Keys keys = {static_cast<const char*>(c.k) + (piece.slot * c.k_slot + head * c.k_head) * kv_size,
                           static_cast<const char*>(c.v) + (piece.slot * c.v_slot + head * c.v_head) * kv_size,
                           c.k_token, c.v_token, 0, end, int(c.dim), int(c.v_dim)};
        const Softmax softmax = {float(c.scale), float(c.softcap)};
        const Found found = c.kv_type ? attend<bf16>(rows, keys, softmax) : attend<float>(rows, keys, softmax);
        thread_local std::vector<float> merged;
        for (i64 row = 0; row < rows.count; row++) {
            const float* values = found.out + row * found.out_dim;
            const i64 token = piece.packed + row / c.group, member = row % c.group;
            const i64 folded = head * all + token * c.group + member, query_head = head * c.group + member;
            // The parts of the document, the own keys and the sink, each weighed by its share of all exponentials.
            const float own_peak = float(found.peak[row] * LN2);
            float peak = own_peak;
            if (c.sinks && c.sinks[query_head] > peak) peak = c.sinks[query_head];
            for (i64 part = 0; part < c.parts; part++) {
                const float lse = c.shared_lse[part * c.kv_heads * all + folded];
                if (lse > peak) peak = lse;
            }
            const float shift = peak == -INF ? 0.0f : peak;
            const float own = std::exp(own_peak - shift);
            float total = own * found.total[row];
            if (c.sinks) total += std::exp(c.sinks[query_head] - shift);
            merged.resize(size_t(c.v_dim));
            scale(values, own, c.v_dim, merged.data());
            for (i64 part = 0; part < c.parts; part++) {
                const i64 at = part * c.kv_heads * all + folded;
                const float weight = std::exp(c.shared_lse[at] - shift);
                total += weight;
                add_scaled(c.shared + at * c.v_dim, weight, c.v_dim, merged.data());
            }
            const float share = total == 0 ? 0.0f : 1.0f / total;
            const i64 to = (token * c.kv_heads * c.group + query_head) * c.v_dim;
            if (c.q_type)
                for (i64 d = 0; d < c.v_dim; d++) static_cast<bf16*>(c.out)[to + d] = to_bf16(merged[d] * share);
            else
                scale(merged.data(), share, c.v_dim, static_cast<float*>(c.out) + to);
        }
    }
};

template <typename Work, typename Call>
bool run_all(const Call* calls, i64 count, int threads, Parallel parallel) {
    try {
        const std::vector<Work> works(calls, calls + count);
        i64 tasks = 0;
        for (const Work& work : works) tasks += work.tasks;
        return for_each_task(tasks, threads, parallel, [&](i64 task) {
            size_t at = 0;
            for (; task >= works[at].tasks; at++) task -= works[at].tasks;
            size_t after = at;
            i64 next = task + threads;  // mostly this thread's next
            for (; after < works.size() && next >= works[after].tasks; after++) next -= works[after].tasks;
            works[at].run(task, after < works.size() ? &works[after] : nullptr, next);
        });
    } catch (const std::bad_alloc&) {
        return false;
    }
}

}  // namespace

bool attend_prefixes(const PrefixCall* calls, i64 count, int threads, Parallel parallel) {
    return run_all<PrefixWork>(calls, count, threads, parallel);
}

bool attend_owns(const OwnCall* calls, i64 count, int threads, Parallel parallel) {
    return run_all<OwnWork>(calls, count, threads, parallel);
}

extern "C" {

int attend_prefix(const PrefixCall* call) {
    return attend_prefixes(call, 1, int(call->threads), call->parallel) ? 0 : 1;
}

int attend_own(const OwnCall* call) { return attend_owns(call, 1, int(call->threads), call->parallel) ? 0 : 1; }

}  // extern "C"
