// What a debug build does about a wait without end: it says who waits for what, and stops the
// kernel. In any other build nothing is left of it.
#pragma once

#include "ptx/ptx_sm90.cuh"

#ifndef WATCHDOG_SECONDS
#define WATCHDOG_SECONDS 0
#endif
// How long a thread may wait for others; 0: for ever.
constexpr int kWatchdogSeconds = WATCHDOG_SECONDS;

// Where in the source a function is called: a parameter `Caller caller = Caller::here()` knows.
struct Caller {
    const char* function;
    int line;

    __device__ static constexpr Caller here(const char* function = __builtin_FUNCTION(),
                                            int line = __builtin_LINE()) {
        return {function, line};
    }
};

// Made when a wait begins, and asked every time that it goes on.
struct Watchdog {
    long long begin = kWatchdogSeconds == 0 ? 0 : ptx::nanoseconds();

    // Says that it is `what` number `number`, of which `at` keeps count, that does not come.
    __device__ void check(const char* what, int number, const void* at, Caller caller) const {
        constexpr long long kLimit = kWatchdogSeconds * 1'000'000'000ll;
        if (kLimit == 0 || ptx::nanoseconds() - begin < kLimit) return;
        if (threadIdx.x % 32 == 0) {
            printf("cufa: block %u, thread %u has waited %d s in %s, line %d, for %s %d at %p\n",
                   blockIdx.x, threadIdx.x, kWatchdogSeconds, caller.function, caller.line, what,
                   number, at);
        }
        __trap();
    }
};
