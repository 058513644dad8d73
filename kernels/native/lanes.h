// Vectors as wide as this CPU's, and the threads that torch computes on.

#pragma once

#include <atomic>
#include <cstdint>
#include <new>

#if defined(LANES)  // with REGISTERS and WIDER_THAN_REGISTERS, by a test
#elif defined(__AVX512F__)
#define LANES 16
#define REGISTERS 32
#elif defined(__AVX__)
#define LANES 8
#define REGISTERS 16
#elif defined(__aarch64__)
#define LANES 4
#define REGISTERS 32
#else
#define LANES 4
#define REGISTERS 16
#endif

// Keeps a vector in its register: compilers else load it anew for each of its products, and the loads set the pace.
#if defined(WIDER_THAN_REGISTERS)
#define HOLD(x) (void)(x)
#elif defined(__x86_64__)
#define HOLD(x) asm("" : "+v"(x))
#elif defined(__aarch64__)
#define HOLD(x) asm("" : "+w"(x))
#else
#define HOLD(x) (void)(x)
#endif

namespace {

typedef int64_t i64;

// Asks memory for the line at `p`. A compiler sees no effect in that, and leaves a loop out that does nothing else.
template <int NEARNESS = 2>  // 2: into the second cache, 3: into the first
inline void fetch_line(const void* p) {
    __builtin_prefetch(p, 0, NEARNESS);
    asm volatile("");
}

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef float vf_unaligned __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

inline vf load(const float* p) { return *reinterpret_cast<const vf_unaligned*>(p); }
inline void store(float* p, vf x) { *reinterpret_cast<vf_unaligned*>(p) = x; }
inline float sum(vf x) {
    float total = 0;
    for (int lane = 0; lane < LANES; lane++) total += x[lane];
    return total;
}

typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel

// Hands out tasks in order to the threads of the process's own OpenMP. False: memory ran out.
template <typename F>
bool for_each_task(i64 tasks, int threads, Parallel parallel, const F& work) {
    struct Shared {
        const F& work;
        i64 tasks;
        std::atomic<i64> next{0};
        std::atomic<bool> failed{false};
    } shared = {work, tasks};
    auto loop = [](void* given) {
        Shared& shared = *static_cast<Shared*>(given);
        for (i64 task; (task = shared.next.fetch_add(1)) < shared.tasks;) {
            try {
                shared.work(task);
            } catch (const std::bad_alloc&) {
                shared.failed = true;
            }
        }
    };
    if (threads > tasks) threads = int(tasks);
    if (threads > 1)
        parallel(loop, &shared, unsigned(threads), 0);
    else
        loop(&shared);
    return !shared.failed;
}

}  // namespace
