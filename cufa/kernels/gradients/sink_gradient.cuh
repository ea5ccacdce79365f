// The gradient of the sinks: -sum P_sink D over all rows of a head, where P_sink is the sink's
// probability in a row. The order is fixed, so every run gives the same bits.
#pragma once

#include "call/warp_rows.cuh"
#include "scores/head_numbers.cuh"

// A thread's part of the gradient of the block's head. `stats_of` finds the RowStats of a sequence,
// a head and a row; those of AtOnce rows at the same time.
template <int Threads, int AtOnce = 4, class StatsOf>
__device__ inline acc_t part_of_sink_gradient(const BackwardParams& params,
                                              const StatsOf& stats_of) {
    const int head = blockIdx.x;
    const acc_t sink = sink_log2_of(params.features, head);
    acc_t sum = 0;
    for (int b = 0; b < params.sizes.batch; ++b) {
        const Sequence sequence(params, b);
#pragma unroll AtOnce
        for (int i = threadIdx.x; i < sequence.seqlen_q; i += Threads) {
            const RowStats row = stats_of(sequence, head, i);
            const acc_t p = exp2_of(sink - row.lse_log2);
            sum -= p == 0 ? acc_t(0) : p * row.d;  // D may be NaN in a row that is all -inf
        }
    }
    return sum;
}

// Stores the sum of all threads' parts.
template <int Threads>
__device__ inline void write_sum_of_parts(const BackwardParams& params, acc_t part,
                                          WarpSums<Threads>& warps) {
    const acc_t sum = block_sum<Threads>(part, warps);
    if (threadIdx.x == 0) static_cast<acc_t*>(params.dsink)[blockIdx.x] = sum;
}

// Computes the gradient with one block per head.
template <int Threads, class StatsOf>
__device__ inline void write_sink_gradient(const BackwardParams& params, const StatsOf& stats_of,
                                           WarpSums<Threads>& warps) {
    write_sum_of_parts<Threads>(params, part_of_sink_gradient<Threads>(params, stats_of), warps);
}
