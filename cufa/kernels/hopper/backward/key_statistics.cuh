// The statistics of a tile's rows that the softmax and its gradient need, for warpgroups with S^T
// and dP^T.
#pragma once

#include "call/numbers.cuh"
#include "call/tensor.cuh"
#include "hopper/wgmma_products.cuh"

// Whether the rows that see a key may end before the rows of the tile in memory. Beyond the last
// row, TMA fills in zeros, of which the caller's function may make anything.
constexpr bool kRowsEnd = kWindow || kPacked || kScoreMod;

// Whether a thread has registers for S and dP of a tile at the same time.
constexpr bool kScoresTogether = SCORES_TOGETHER;

// Whether S starts from -LSE. Where scores are more than products plus ALiBi's line, the LSE is
// subtracted only after the scores are made.
constexpr bool kScoresBeginWithLse = !kSoftcap && !kBias && !kScoreMod;

// The scale of scores, but never so small that an LSE in units of products, LSE / scale, would not
// be finite.
__device__ inline float scale_of_scores(const BackwardParams& call) {
    const float scale = call.softmax_scale;
    return fabsf(scale) < kSmallestScale ? kSmallestScale : scale;
}
// Converts an LSE to the unit in which it is kept: products or, where scores are more than
// products, log 2.
__device__ inline float unit_of_lse(const BackwardParams& call) {
    return kScoresBeginWithLse ? 1 / scale_of_scores(call) : static_cast<float>(kLog2E);
}

// What the softmax and its gradient need of each row of a tile: P = 2^(S - LSE), dS = P o (dP - D).
// The products S and dP start from it. This saves additions afterwards, and waits for shared memory
// between products. Rows that see no key, and rows past the last one, start from a value that makes
// P 0. dP does not include the factor of probabilities that dropout keeps (kept_scale). Nor does D,
// nor do the sums of gradients before they are stored.
//
// A thread's statistics for kEights eights of rows are adjacent, so that it loads them at once. In
// long tiles, and where a thread holds only one of S and dP, this is slower.
template <int BlockM>
struct RowStatistics {
    static constexpr int kEights = BlockM <= kPanelCols && kScoresTogether ? 2 : 1;

    __device__ static int place(int row) {
        if constexpr (kEights == 1) return row;
        const int eight = row / 8, of_thread = row % 8 / 2 * kEights + eight % kEights;
        return eight / kEights * kEights * 8 + of_thread * 2 + row % 2;
    }

    alignas(16) float minus_lse[BlockM];
    float minus_d[BlockM];  // NaN if the row of Q has NaN or infinity, so that dS is NaN
    // Whether rows of Q or dO have NaN or infinity, or those of O, in which that of Q may show.
    alignas(16) bool nonfinite;
};
