// Work of a whole grid: the number of a thread and of a warp in it, and sums set to zero.
#pragma once

#include "call/config.cuh"

template <int Threads>
__device__ inline long long thread_of_grid() {
    return static_cast<long long>(blockIdx.x) * Threads + threadIdx.x;
}
template <int Threads>
__device__ inline long long warp_of_grid() {
    return static_cast<long long>(blockIdx.x) * (Threads / 32) + threadIdx.x / 32;
}

// Sets sums to zero. The whole grid takes part.
template <int Threads>
__device__ inline void clear_sums(acc_t* sums, long long count) {
    const long long stride = static_cast<long long>(gridDim.x) * Threads;
    for (long long i = thread_of_grid<Threads>(); i < count; i += stride) sums[i] = 0;
}
