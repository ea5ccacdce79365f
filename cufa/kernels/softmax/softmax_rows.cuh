// The softmax of one row by one block: safe, in three passes over the row, or with a running
// maximum in two. Both return what the row's LSE needs. The input and output may be the same row.
#pragma once

#include "call/numbers.cuh"

// Maximum and sum of the scores of a row so far. Scores are not in log 2, unlike in the tiled
// rungs: they are already in memory. Multiplying a large score by log2(e) would round it more than
// multiplying its small distance from the maximum.
struct RowSoftmax {
    acc_t max = negative_infinity();
    acc_t sum = 0;  // of e^(score - max)

    __device__ void raise_max(acc_t score) { max = score > max ? score : max; }

    // Merges the maximum and sum of other scores; a single score has sum 1 (Milakov and Gimelshein
    // 2018, section 3.1).
    __device__ void merge(acc_t other_max, acc_t other_sum) {
        const acc_t old_max = max;
        raise_max(other_max);
        sum = sum * weight(old_max) + other_sum * weight(other_max);
    }

    // e^(score - max). As long as all scores are -inf there is no maximum to subtract: -inf - -inf
    // would be NaN.
    __device__ acc_t weight(acc_t score) const {
        const acc_t shift = max == negative_infinity() ? acc_t(0) : max;
        return exp2_of((score - shift) * acc_t(kLog2E));
    }

    // 0 and -inf for a row that saw no key.
    __device__ acc_t normalizer() const { return sum == 0 ? acc_t(0) : 1 / sum; }
    __device__ acc_t lse() const {
        return sum == 0 ? negative_infinity() : max + log2_of(sum) * acc_t(kLn2);
    }
};

template <int Threads>
struct RowScratch {
    RowSoftmax warps[Threads / 32];
};

// Merges the statistics of all threads of the block, and returns the result to each.
template <int Threads>
__device__ inline RowSoftmax merge_block(RowSoftmax softmax, RowScratch<Threads>& scratch) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        const acc_t other_max = __shfl_xor_sync(0xffffffffu, softmax.max, offset);
        const acc_t other_sum = __shfl_xor_sync(0xffffffffu, softmax.sum, offset);
        softmax.merge(other_max, other_sum);
    }
    if (threadIdx.x % 32 == 0) scratch.warps[threadIdx.x / 32] = softmax;
    __syncthreads();
    softmax = scratch.warps[0];
    for (int w = 1; w < Threads / 32; ++w) {
        softmax.merge(scratch.warps[w].max, scratch.warps[w].sum);
    }
    __syncthreads();  // the next merge may overwrite the scratch
    return softmax;
}

// y = e^(x - max) / sum, the last pass of both.
template <int Threads, class In, class Out>
__device__ inline void normalize_row(const In* x, Out* y, int cols, RowSoftmax softmax) {
    const acc_t normalizer = softmax.normalizer();
    for (int j = threadIdx.x; j < cols; j += Threads) {
        y[j] = from_acc<Out>(softmax.weight(to_acc(x[j])) * normalizer);
    }
}

// Safe softmax: the maximum, then the sum, then the quotients.
template <int Threads, class In, class Out>
__device__ inline RowSoftmax softmax_three_passes(const In* x, Out* y, int cols,
                                                  RowScratch<Threads>& scratch) {
    RowSoftmax softmax;
    for (int j = threadIdx.x; j < cols; j += Threads) softmax.raise_max(to_acc(x[j]));
    softmax = merge_block(softmax, scratch);

    acc_t sum = 0;
    for (int j = threadIdx.x; j < cols; j += Threads) sum += softmax.weight(to_acc(x[j]));
    softmax.sum = sum;
    softmax = merge_block(softmax, scratch);

    normalize_row<Threads>(x, y, cols, softmax);
    return softmax;
}

// Online softmax: maximum and sum in one pass, then the quotients.
template <int Threads, class In, class Out>
__device__ inline RowSoftmax softmax_two_passes(const In* x, Out* y, int cols,
                                                RowScratch<Threads>& scratch) {
    RowSoftmax softmax;
    for (int j = threadIdx.x; j < cols; j += Threads) softmax.merge(to_acc(x[j]), 1);
    softmax = merge_block(softmax, scratch);

    normalize_row<Threads>(x, y, cols, softmax);
    return softmax;
}
