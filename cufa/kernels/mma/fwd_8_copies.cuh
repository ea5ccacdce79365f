// How a block of fwd_8_split_kv copies its queries, and how each of its teams copies tiles of K and
// V.
#pragma once

#include "mma/fwd_8_rows.cuh"
#include "mma/key_pages.cuh"

// Starts the copy of the block's rows of Q; rows past the last become zeros.
__device__ inline void copy_queries(Smem& smem, const ForwardParams& params, const Work& work) {
    constexpr int kChunk = kChunkOfRow<scalar_t, kHeadDim>;
    constexpr int kRowChunks = kHeadDim / kChunk;
#pragma unroll 1  // it is short, and runs once
    for (int i = threadIdx.x; i < kBlockM * kRowChunks; i += kThreads) {
        const int row = i / kRowChunks, col = i % kRowChunks * kChunk;
        const auto q = work.sequence.queries<const scalar_t>(params.q, work.head(row));
        const bool inside = row < work.rows();
        ptx::copy_async<kChunk * sizeof(scalar_t)>(smem.inputs.q.at(row, col),
                                                   q.row(work.query(row)) + col, inside);
    }
}

// The K and V of which a team copies tiles.
struct Source {
    KeyMatrix<const key_t> k, v;
    int end_key;

    __device__ TilePages<kBlockN> pages_of(int tile) const { return {k, tile * kBlockN, end_key}; }
    // The pages of the team's first tiles, all looked up at once.
    template <int Tiles>
    __device__ void look_up(TilePages<kBlockN> (&pages)[Tiles], int first_tile) const {
        if constexpr (kPaged) {
#pragma unroll
            for (int i = 0; i < Tiles; ++i) pages[i] = pages_of(first_tile + i * kTeams);
        }
    }

    // Starts the copy of a tile, if it is before `end_tile`.
    __device__ void copy(Stage& stage, int tile, int end_tile,
                         const TilePages<kBlockN>& pages) const {
        if (tile >= end_tile) return;
        copy_keys<kTeamThreads, kHeadDim>(stage.k, k, pages, tile * kBlockN, end_key,
                                          team_thread());
        if constexpr (!kValuesInKeys)
            copy_keys<kTeamThreads, kValueDim>(stage.v(), v, pages, tile * kBlockN, end_key,
                                               team_thread());
    }
};
