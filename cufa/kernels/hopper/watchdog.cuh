// How a debug build handles a wait that never ends: it reports who waits for what, and stops the
// kernel. In other builds nothing of it remains.
#pragma once

#include "ptx/ptx_sm90.cuh"

#ifndef WATCHDOG_SECONDS
#define WATCHDOG_SECONDS 0
#endif
// How long a thread may wait; 0: forever.
constexpr int kWatchdogSeconds = WATCHDOG_SECONDS;

// NVRTC knows the place of a call from version 12.9 on.
#if defined(__CUDACC_VER_MAJOR__) && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ < 1209
#define CALLING_FUNCTION "?"
#define CALLING_LINE 0
#else
#define CALLING_FUNCTION __builtin_FUNCTION()
#define CALLING_LINE __builtin_LINE()
#endif

// The place of a call in the source: a parameter `Caller caller = Caller::here()` receives it.
struct Caller {
    const char* function;
    int line;

    __device__ static constexpr Caller here(const char* function = CALLING_FUNCTION,
                                            int line = CALLING_LINE) {
        return {function, line};
    }
};

// Created when a wait begins, and checked each time that the wait goes on.
struct Watchdog {
    long long begin = kWatchdogSeconds == 0 ? 0 : ptx::nanoseconds();

    // Reports that `what` number `number`, counted at `at`, does not come.
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
