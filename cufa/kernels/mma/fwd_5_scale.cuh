// The scale of fwd_5_mma's scores: what products are multiplied with before exp2, or Q beforehand.
#pragma once

#include "mma/fwd_5_block.cuh"
#include "scores/score_rules.cuh"

// Whether products are scores of log 2 less their row's maximum.
constexpr bool kFolded = sizeof(acc_t) == 8 && !kShapedScores;
// Whether the scale is worked out for each tile, and in no register in between.
constexpr bool kScaleAnew = kLongSteps || sizeof(scalar_t) == 2;

// What products are multiplied with before exp2, unless they are scores of log 2 already.
// It is positive, so that the largest score is that of the largest product and -inf stays the
// least: Q takes the sign, and instead of 0 it is a number that makes 0 of every product.
__device__ inline acc_t scale_log2(const ScoreRules& rules) {
    if constexpr (kShapedScores || kFolded) return 1;
    constexpr acc_t kLeastScale = 0x1p-126;
    acc_t scale = rules.scale;
    if constexpr (kScaleAnew) scale = ptx::anew_float(scale);
    scale *= acc_t(kLog2E);
    return max(scale < 0 ? -scale : scale, kLeastScale);
}

// Numbers of Q that a thread of float64 multiplies at once, in chunks: one by one each would wait
// for a pipe that other warps have.
constexpr int kChunksAtOnce = 8;

// Gives Q the sign of the scale, or all of it.
__device__ inline void take_scale(Smem& smem, const ScoreRules& rules) {
    if (kShapedScores || (!kFolded && rules.scale >= 0)) return;
    using Tile = decltype(smem.q);
    constexpr int kChunkCols = Tile::kMatrixCols, kRowChunks = Tile::kCols / kChunkCols;
    constexpr int kChunks = kBlockM * kRowChunks;
    constexpr int kAtOnce = kFolded ? kChunksAtOnce : 1;  // few calls come here, or all
    using Chunk = Pack<scalar_t, kChunkCols>;
    const acc_t factor = kFolded ? rules.scale * acc_t(kLog2E) : acc_t(-1);
    ptx::wait_copies();
    __syncthreads();
#pragma unroll 1
    for (int first = threadIdx.x; first < kChunks; first += kAtOnce * kThreads) {
        const auto inside = [&](int i) {
            return kChunks % (kAtOnce * kThreads) == 0 || first + i * kThreads < kChunks;
        };
        const auto place = [&](int i) {
            const int chunk = first + i * kThreads, col = chunk % kRowChunks * kChunkCols;
            return reinterpret_cast<Chunk*>(smem.q.at(chunk / kRowChunks, col));
        };
        Chunk chunks[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
            if (inside(i)) chunks[i] = *place(i);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (!inside(i)) break;
#pragma unroll
            for (int e = 0; e < kChunkCols; ++e)
                chunks[i][e] = from_acc<scalar_t>(to_acc(chunks[i][e]) * factor);
            *place(i) = chunks[i];
        }
    }
}
