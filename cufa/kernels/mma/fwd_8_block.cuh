// What a block of fwd_8_split_kv processes, what its teams share, and its shared memory.
#pragma once

#include "mma/half_queries.cuh"
#include "mma/row_parts.cuh"
#include "ptx/ptx_sm90.cuh"

using out_t = OUT_SCALAR;
constexpr bool kDescaled = is_same<key_t, float8_e4m3fn>;
constexpr bool kMixed = !is_same<scalar_t, key_t>;
constexpr int kThreads = THREADS, kWarps = kThreads / 32, kBlocksPerSm = BLOCKS_PER_SM;
constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N, kStages = STAGES;
constexpr bool kSplitKeys = SPLIT_KEYS;    // equally many blocks split the keys of each tile
constexpr bool kEvenShares = EVEN_SHARES;  // the keys of all tiles are divided evenly
static_assert(!kSplitKeys || !kEvenShares, "blocks part the keys one way or the other");
static_assert(!kSplitKeys || kMostQueries == 0, "the parts of all rows are merged");
constexpr bool kNextOverlaps = NEXT_OVERLAPS;  // the launch after this one begins early
// 16-row tiles of a warp: with two, keys and values that it loads serve twice as many rows.
constexpr int kTiles = WARP_ROWS / kMmaM;
constexpr int kTeamWarps = kBlockM / (kTiles * kMmaM);
constexpr int kTeamThreads = kTeamWarps * 32, kTeams = kWarps / kTeamWarps;
static_assert(kTeamWarps * kTiles * kMmaM == kBlockM, "a warp must own whole 16-row tiles");
static_assert(kTeams * kTeamWarps == kWarps, "the warps of a team must divide the block's");
static_assert(kBlockN % kMmaK == 0, "BLOCK_N must be whole steps of P V");
static_assert(kStages > 1, "a tile is copied while another one is worked on");
static_assert(sizeof(ForwardParams) == PARAMS_BYTES, "the host passes a different struct");

struct Stage {
    MmaTile<kBlockN, kHeadDim> k;
    MmaTile<kBlockN, kValueDim> v;
};

struct Smem : HalfQueries<kBlockM, kMixed> {
    MmaTile<kBlockM, kHeadDim, scalar_t> q;
    union {
        Stage stages[kTeams][kStages];
        RowPart parts[kTeams][kBlockM];
    };
};

using Scores = Accumulators<kTiles, kBlockN>;

// A thread's team and its place in it.
__device__ inline int team() {
    return threadIdx.x / kTeamThreads;
}
__device__ inline int team_thread() {
    return threadIdx.x % kTeamThreads;
}
__device__ inline void sync_team() {
    constexpr int kFirstTeam = 1;  // barrier 0 is the block's
    if constexpr (kTeamWarps == 1) {
        __syncwarp();
    } else {
        ptx::named_barrier_sync<kTeamThreads>(kFirstTeam + team());
    }
}
// The warp's first row in the block's tile, and a lane's row in each half of its fragments `m`.
__device__ inline int warp_row() {
    return team_thread() / 32 * kTiles * kMmaM;
}
__device__ inline int row_of(int m, int half) {
    return fragment_row(warp_row(), m, half);
}
