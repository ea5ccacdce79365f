// Which part of a tile of scores is whose in fwd_5_mma.
#pragma once

#include "mma/mma_tiles.cuh"

constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N;
constexpr int kSplit = SPLIT;  // warps that share rows and part the output's columns
constexpr int kRowWarps = THREADS / 32 / kSplit;
constexpr int kTiles = kBlockM / (kRowWarps * kMmaM);
constexpr int kDims = round_up(kValueDim, kMmaK* kSplit) / kSplit;  // columns of a warp's output
static_assert(kRowWarps * kSplit == THREADS / 32, "SPLIT must divide the warps");
static_assert(kTiles * (kRowWarps * kMmaM) == kBlockM, "a warp must own whole 16-row tiles");
static_assert(kBlockN % kMmaK == 0, "BLOCK_N must be a multiple of 16");
static_assert(sizeof(ForwardParams) == PARAMS_BYTES, "the host passes a different struct");

using Scores = Accumulators<kTiles, kBlockN>;

// The first row of the block's tile that is the warp's, and the first column of its output.
__device__ inline int warp_row() {
    const int warp = threadIdx.x / 32;
    return (kSplit == 1 ? warp : warp % kRowWarps) * kTiles * kMmaM;
}
__device__ inline int warp_col() {
    return kSplit == 1 ? 0 : threadIdx.x / 32 / kRowWarps * kDims;
}

// Which row of the block's tile a lane's half of its fragments `m` is.
__device__ inline int row_of(int m, int half) {
    return fragment_row(warp_row(), m, half);
}
