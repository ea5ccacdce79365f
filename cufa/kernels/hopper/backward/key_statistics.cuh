// What the softmax and its gradient need of a tile's rows, where a warpgroup has S^T and dP^T.
#pragma once

#include "call/tensor.cuh"
#include "hopper/wgmma_tiles.cuh"
#include "softmax/online_softmax.cuh"

// Whether the rows that see a key may end before those that a tile has in memory. Beyond the last
// row of all, the copy engine fills in zeros, of which the caller's function may make anything.
constexpr bool kRowsEnd = kWindow || kPacked || kScoreMod;

// Whether a thread has registers for S and dP of a tile at the same time.
constexpr bool kScoresTogether = SCORES_TOGETHER;

// Whether S begins with -LSE. Where scores are more than products and ALiBi's line, that comes in
// only after them.
constexpr bool kScoresBeginWithLse = !kSoftcap && !kBias && !kScoreMod;

// The scale of scores, but never so small that an LSE in units of products, LSE / scale, would not
// be finite: a smaller one leaves all scores at 0 as well.
__device__ inline float scale_of_scores(const BackwardParams& call) {
    constexpr float kSmallest = 1e-30f;
    return fabsf(call.softmax_scale) < kSmallest ? kSmallest : call.softmax_scale;
}
// What dropout multiplies probabilities with that it keeps. dP is without it, and so are D, which
// is subtracted from that, and the sums of gradients until they are stored.
__device__ inline float kept_scale(const BackwardParams& call) {
    return kDropout ? static_cast<float>(call.features.kept_scale) : 1;
}
// What turns an LSE into the units in which it is kept: those of products or, where scores are
// more than those, of log 2.
__device__ inline float unit_of_lse(const BackwardParams& call) {
    return kScoresBeginWithLse ? 1 / scale_of_scores(call) : static_cast<float>(kLog2E);
}

// What the softmax and its gradient need of each row of a tile: P = 2^(S - LSE), dS = P o (dP - D).
// The products S and dP begin with it, which costs no addition afterwards and no wait for shared
// memory between products. Rows that see no key, and those past the last one, begin with what makes
// P 0.
//
// Those that a thread has of kEights eights of rows lie together, so that it loads them at once. In
// long tiles, and where a thread has but one of S and dP, that is slower.
template <int BlockM>
struct RowStatistics {
    static constexpr int kEights = BlockM <= kPanelCols && kScoresTogether ? 2 : 1;

    __device__ static int place(int row) {
        if constexpr (kEights == 1) return row;
        const int eight = row / 8, of_thread = row % 8 / 2 * kEights + eight % kEights;
        return eight / kEights * kEights * 8 + of_thread * 2 + row % 2;
    }

    alignas(16) float minus_lse[BlockM];
    float minus_d[BlockM];
    alignas(16) bool nonfinite;  // whether there is NaN or infinity in the rows of Q or dO
};
