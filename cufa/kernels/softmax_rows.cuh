// The softmax of one row by one block of threads: safely in three passes over the row, or in two
// with a running maximum. Both return what the row's LSE needs. In and out may be the same row.
#pragma once

#include "online_softmax.cuh"

template <int Threads>
struct RowScratch {
    OnlineSoftmax warps[Threads / 32];
};

// The statistics of all threads of the block merged, and given to all of them.
template <int Threads>
__device__ inline OnlineSoftmax merge_block(OnlineSoftmax softmax, RowScratch<Threads>& scratch) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        OnlineSoftmax other;
        other.max = __shfl_xor_sync(0xffffffffu, softmax.max, offset);
        other.sum = __shfl_xor_sync(0xffffffffu, softmax.sum, offset);
        softmax.merge(other);
    }
    if (threadIdx.x % 32 == 0) scratch.warps[threadIdx.x / 32] = softmax;
    __syncthreads();
    softmax = scratch.warps[0];
    for (int w = 1; w < Threads / 32; ++w) softmax.merge(scratch.warps[w]);
    __syncthreads();  // the next merge may overwrite the scratch
    return softmax;
}

template <class In>
__device__ inline acc_t score_log2(In x) {
    return to_acc(x) * acc_t(kLog2E);
}

// y = 2^(x - max) / sum, the pass that both ways end with.
template <int Threads, class In, class Out>
__device__ inline void normalize_row(const In* x, Out* y, int cols, OnlineSoftmax softmax) {
    const acc_t normalizer = softmax.normalizer();
    for (int j = threadIdx.x; j < cols; j += Threads) {
        y[j] = from_acc<Out>(exp2_of(score_log2(x[j]) - softmax.shift()) * normalizer);
    }
}

// Safe softmax: the maximum, then the sum, then the quotients.
template <int Threads, class In, class Out>
__device__ inline OnlineSoftmax softmax_three_passes(const In* x, Out* y, int cols,
                                                     RowScratch<Threads>& scratch) {
    OnlineSoftmax softmax;
    for (int j = threadIdx.x; j < cols; j += Threads) softmax.raise_max(score_log2(x[j]));
    softmax = merge_block(softmax, scratch);

    acc_t sum = 0;
    for (int j = threadIdx.x; j < cols; j += Threads) {
        sum += exp2_of(score_log2(x[j]) - softmax.shift());
    }
    softmax.sum = sum;
    softmax = merge_block(softmax, scratch);

    normalize_row<Threads>(x, y, cols, softmax);
    return softmax;
}

// Online softmax: maximum and sum in one pass, then the quotients.
template <int Threads, class In, class Out>
__device__ inline OnlineSoftmax softmax_two_passes(const In* x, Out* y, int cols,
                                                   RowScratch<Threads>& scratch) {
    OnlineSoftmax softmax;
    for (int j = threadIdx.x; j < cols; j += Threads) softmax.add(score_log2(x[j]));
    softmax = merge_block(softmax, scratch);

    normalize_row<Threads>(x, y, cols, softmax);
    return softmax;
}
