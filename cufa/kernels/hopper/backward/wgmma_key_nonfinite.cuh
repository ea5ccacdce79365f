// NaN and infinity in dO, which are taken out of tiles that a mask cuts through.
#pragma once

#include "hopper/backward/key_softmax.cuh"
#include "hopper/backward/wgmma_key_work.cuh"

// Adds NaN and infinity in dO to the gradients of the values that those rows see, for a warpgroup's
// 64 keys and the tiles of rows of which some do not see all keys of the block. They were taken out
// of the products' operands, because 0 times NaN would reach other keys. They are searched for
// again, so that nothing has to be remembered.
template <int Cols, int BlockM, class Tiles>
__device__ inline void add_nonfinite(WgmmaSums<Cols>& dv, const BackwardParams& call,
                                     const Sequence& sequence, HeadRange heads, const Tiles& tiles,
                                     const KeySoftmax<BlockM>& softmax, int first_col) {
#pragma unroll 1
    for (int head = heads.begin; head < heads.end; ++head) {
        const auto dout = sequence.queries<const scalar_t>(call.dout, head);
        const int end_row = min(tiles.end * BlockM, sequence.seqlen_q);
        const TilePlace place = {call.features, sequence.batch, head, 0};
#pragma unroll 1
        for (int row = tiles.begin * BlockM; row < end_row; ++row) {
            if (!kHidesScores && !tiles.masked(row / BlockM)) continue;
#pragma unroll
            for (int i = 0; i < Cols / 2; ++i) {
                const int col = first_col + i / 4 * 8 + softmax.query + i % 2;
                if (!softmax.sees(place, row, i / 2 % 2) || col >= kValueDim) continue;
                const scalar_t value = dout.row(row)[col];
                if (!is_finite(value)) dv[i] += to_acc(value);
            }
        }
    }
}
