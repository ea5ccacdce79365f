// How a block of fwd_8_split_kv copies its queries, and how each of its teams copies tiles of K and
// V.
#pragma once

#include "mma/fwd_8_scores.cuh"
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

// A team's tiles, every kTeams-th of a range: one is attended to while the next are copied.
struct TeamTiles {
    const Source& source;
    Stage* const stages;
    int tile, ahead, end;  // the tile that is attended to, and the next one to be copied
    int stage = 0;         // of the tile
    // Whether the team sees anything of the tiles whose copies have begun, the last one in bit 0.
    unsigned int wanted = ~0u;

    __device__ TeamTiles(const Source& source, Stage* stages, const TileRange& range)
        : source(source), stages(stages), tile(range.begin + team()), ahead(tile), end(range.end) {}

    // Begins to copy a tile for each stage but the last, and looks up the pages of the next two.
    // What `copy_others` copies will be there together with the first tile.
    template <class Copy>
    __device__ void begin(TilePages<kBlockN> (&pages)[kStages + 1], const Copy& copy_others) {
        source.look_up(pages, tile);
#pragma unroll
        for (int i = 0; i < kStages; ++i) {
            clear_padding<kTeamThreads, kHeadDim>(stages[i].k, team_thread());
            if constexpr (!kValuesInKeys)
                clear_padding<kTeamThreads, kValueDim>(stages[i].v(), team_thread());
            if (i == kStages - 1) continue;  // the loop begins with its copy
            source.copy(stages[i], ahead, end, pages[i]);
            if (i == 0) copy_others();
            ptx::commit_copies();
            ahead += kTeams;
        }
    }

    __device__ bool at_end() const { return tile >= end; }
    __device__ Stage& current() const { return stages[stage]; }
    __device__ bool wants_this() const { return wanted >> SeenScores::kAhead & 1; }
    __device__ int first_key_after() const { return (ahead + kTeams) * kBlockN; }

    // Waits for the tile, and until every warp is done with the one before.
    __device__ void arrive(const WarpRows& rows, SeenScores& seen) {
        ptx::wait_copies_but<kStages - 2>();
        if constexpr (kKeyMask) {
            wanted = wanted << 1 | sync_team_or(seen.look_ahead(rows, ahead * kBlockN));
        } else {
            sync_team();
        }
    }
    // Begins to copy the next tile, in the place of the one before, if it is wanted.
    __device__ void copy_next(const TilePages<kBlockN>& pages) {
        if (wanted & 1)
            source.copy(stages[stage == 0 ? kStages - 1 : stage - 1], ahead, end, pages);
        ptx::commit_copies();  // one group per tile, even if empty, so that groups can be counted
    }
    __device__ void advance() {
        stage = stage == kStages - 1 ? 0 : stage + 1;
        tile += kTeams;
        ahead += kTeams;
    }
};
