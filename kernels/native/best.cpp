// The best of each row of scores, and whether all of them are numbers.

#include <algorithm>
#include <cmath>
#include <limits>

#include "exp2.h"
#include "lanes.h"

struct BestCall {
    const float* scores;  // [rows, size], `row` between rows
    int64_t* best;        // [rows]; the first of several
    uint8_t* finite;      // [rows]; where 0, `best` says nothing
    i64 rows, row, size, threads;
    Parallel parallel;
};

namespace {

constexpr i64 BLOCK = 1024;  // scores, of which only those of the best block are searched

void look(const float* x, i64 size, int64_t& best, uint8_t& finite) {
    float highest = -std::numeric_limits<float>::infinity(), total = 0;
    i64 found = 0;
    for (i64 begin = 0; begin < size; begin += BLOCK) {
        const i64 end = std::min(begin + BLOCK, size);
        vf sums = {}, tops = splat(x[begin]);
        float top = x[begin];
        i64 i = begin;
        for (; i + LANES <= end; i += LANES) {
            const vf some = load(x + i);
            sums += some;
            tops = some > tops ? some : tops;
        }
        for (int lane = 0; lane < LANES; lane++) top = std::max(top, float(tops[lane]));
        total += sum(sums);
        for (; i < end; i++) total += x[i], top = std::max(top, x[i]);
        if (top > highest) highest = top, found = begin;
    }
    finite = std::isfinite(total);
    if (!finite) finite = std::all_of(x, x + size, [](float score) { return std::isfinite(score); });
    best = std::find(x + found, x + size, highest) - x;
}

}  // namespace

extern "C" int best(const BestCall* call) {
    const BestCall& c = *call;
    auto row = [&](i64 at) { look(c.scores + at * c.row, c.size, c.best[at], c.finite[at]); };
    return for_each_task(c.rows, int(c.threads), c.parallel, row) ? 0 : 1;
}
