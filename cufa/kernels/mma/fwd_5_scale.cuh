// The scale of fwd_5_mma's scores: a factor of products before exp2, or of Q beforehand.
#pragma once

#include "mma/fwd_5_block.cuh"
#include "scores/score_rules.cuh"

// Whether products are already scores in log 2, minus their row's maximum.
constexpr bool kFolded = sizeof(acc_t) == 8 && !kShapedScores;
// Whether the factor is computed anew for each tile, to take no register in between.
constexpr bool kScaleAnew = sizeof(scalar_t) == 2;

// The factor of products before exp2, unless they are already scores in log 2. It is positive, so
// that the largest product has the largest score and -inf stays the least. Q takes the sign.
// Instead of 0, the factor is a number that makes every product 0.
__device__ inline acc_t scale_log2(const ScoreRules& rules) {
    if constexpr (kShapedScores || kFolded) return 1;
    constexpr acc_t kLeastScale = 0x1p-126;
    acc_t scale = rules.scale * acc_t(kLog2E);
    if constexpr (kScaleAnew) scale = ptx::anew(float(scale));
    return max(scale < 0 ? -scale : scale, kLeastScale);
}

// Chunks of Q that a float64 thread multiplies at once: one by one, each would wait for a pipe that
// other warps use.
constexpr int kChunksAtOnce = 8;

// Multiplies Q by the sign of the scale or, if kFolded, by the scale.
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
